"""Token embedding, split over the vocabulary where the tensor axis divides it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.layers.sharding import TENSOR, param


def vocab_spec(mesh: Mesh, vocab_size: int) -> P:
    """Layout of a [vocab, hidden] table: rows split over the tensor axis, or replicated when they do not divide."""
    return P(TENSOR, None) if vocab_size % mesh.shape[TENSOR] == 0 else P()


class Embedding(nnx.Module):
    """ids [...] -> [..., hidden], times ``scale`` rounded to the weight dtype (as HF does for Gemma)."""

    def __init__(self, mesh: Mesh, vocab_size: int, hidden: int, dtype: str, scale: float = 1.0) -> None:
        self.weight = param(mesh, (vocab_size, hidden), dtype, vocab_spec(mesh, vocab_size))
        self.scale = scale

    def __call__(self, ids: jax.Array) -> jax.Array:
        table = self.weight[...]
        x = jnp.take(table, ids, axis=0, mode="clip")
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, table.dtype)
