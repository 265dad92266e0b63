"""Rotary position embedding: frequencies from a RopeSpec (pure numpy), rotation of query and key heads."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.configs.layer_spec import RopeSpec, RopeType
from sgl_jax.srt.layers.sharding import last_axis


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """Angle per position of each rotating pair, float64 [pairs].

    DEFAULT: ``pairs = int(partial * head_dim) // 2``, denominators over the rotating dims. PROPORTIONAL: ``head_dim // 2`` pairs over
    the whole head, denominators over ``head_dim``, all but the first ``int(partial * head_dim // 2)`` zero. LINEAR divides by ``factor``.
    LLAMA3 divides low frequencies by ``factor`` and blends the band in between.
    """
    if spec.type is RopeType.PROPORTIONAL:
        turning = int(spec.partial_factor * head_dim // 2)
        freq = np.zeros(head_dim // 2)
        freq[:turning] = spec.theta ** (-2.0 * np.arange(turning) / head_dim)
        return freq / spec.factor
    rotary_dim = int(spec.partial_factor * head_dim)
    freq = spec.theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if spec.type is RopeType.LINEAR:
        return freq / spec.factor
    if spec.type is RopeType.LLAMA3:
        wavelength = 2 * math.pi / freq
        high, low = spec.high_freq_factor, spec.low_freq_factor
        blend = np.clip((spec.original_context / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 - blend) * freq / spec.factor + blend * freq
    return freq


def rope_tables(spec: RopeSpec, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [..., pairs], for integer ``positions`` [...]. Angles are float32 products, as in HF."""
    freq = jnp.asarray(inverse_frequencies(spec, head_dim), jnp.float32)
    angles = positions.astype(jnp.float32)[..., None] * last_axis(freq, positions.ndim + 1)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate pairs ``(i, i + pairs)`` of the first ``2 * pairs`` dims of every head; x [..., T, heads, head_dim]."""
    cos, sin = (t[..., None, :] for t in tables)
    pairs = cos.shape[-1]
    wide = x.astype(jnp.float32)
    a, b, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], wide[..., 2 * pairs :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)
