"""RMS normalisation, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.layers.sharding import last_axis, param


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, float32 in and out of the root; result is float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """``rms_normalize(x) * w``, or ``* (1 + w)`` when ``zero_centred`` (Gemma 3)."""

    def __init__(self, mesh: Mesh, size: int, dtype: str, eps: float, zero_centred: bool = False) -> None:
        self.weight = param(mesh, (size,), dtype, P())
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = last_axis(self.weight[...].astype(jnp.float32), x.ndim)
        if self.zero_centred:
            weight = 1.0 + weight
        return (rms_normalize(x, self.eps) * weight).astype(x.dtype)
