"""Bias-free linear layers in HF orientation ``[out, in]``, split over the tensor axis by output or input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.layers.sharding import TENSOR, param


class ColumnLinear(nnx.Module):
    """``y = x W^T`` with the outputs split: x [..., in] (replicated) -> y [..., out] (tensor).

    ``heads`` = (heads in the checkpoint, copies of each); ``out_features`` counts the copies.
    """

    def __init__(
        self, mesh: Mesh, in_features: int, out_features: int, dtype: str, heads: tuple[int, int] = (1, 1)
    ) -> None:
        self.weight = param(mesh, (out_features, in_features), dtype, P(TENSOR, None), heads)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("...i,oi->...o", x, self.weight[...])


class RowLinear(nnx.Module):
    """``y = x W^T`` with the inputs split: x [..., in] (tensor) -> y [..., out], summed over the tensor axis."""

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, dtype: str) -> None:
        self.weight = param(mesh, (out_features, in_features), dtype, P(None, TENSOR))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("...i,oi->...o", x, self.weight[...])
