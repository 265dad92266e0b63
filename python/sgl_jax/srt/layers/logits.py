"""From hidden states to float32 logits at the rows somebody asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from sgl_jax.srt.layers.embedding import vocab_spec
from sgl_jax.srt.layers.sharding import param


def select_rows(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """hidden [dp, T, H], rows [dp, R] (indices into T, rank-local) -> [dp, R, H]."""
    return jnp.take_along_axis(hidden, rows[..., None], axis=1, mode="clip")


def project_logits(hidden: jax.Array, table: jax.Array, soft_cap: float | None) -> jax.Array:
    """hidden [dp, R, H], table [V, H] -> float32 [dp, R, V], ``cap * tanh(x / cap)`` when ``soft_cap``."""
    logits = jnp.einsum("...h,vh->...v", hidden, table, preferred_element_type=jnp.float32)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


class LMHead(nnx.Module):
    """Untied output table [vocab, hidden]."""

    def __init__(self, mesh: Mesh, vocab_size: int, hidden: int, dtype: str) -> None:
        self.weight = param(mesh, (vocab_size, hidden), dtype, vocab_spec(mesh, vocab_size))
