"""Rotary frequencies against the definitions, rotation against literal pairs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sgl_jax.srt.configs.layer_spec import RopeSpec, RopeType
from sgl_jax.srt.layers.rotary import apply_rope, inverse_frequencies, rope_tables


def test_default_frequencies():
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(1e4), 8), [1, 1e-1, 1e-2, 1e-3])
    np.testing.assert_allclose(inverse_frequencies(RopeSpec(1e4, partial_factor=0.5), 8), [1, 1e-2])
    np.testing.assert_allclose(
        inverse_frequencies(RopeSpec(1e4, RopeType.LINEAR, factor=4.0), 4), [0.25, 0.0025]
    )


def test_proportional_frequencies_keep_the_whole_head():
    """Gemma 4 full layers: 64 of 256 angles turn, denominators over 512, the other 192 stand still."""
    freq = inverse_frequencies(RopeSpec(1e6, RopeType.PROPORTIONAL, partial_factor=0.25), 512)
    assert freq.shape == (256,)
    np.testing.assert_allclose(freq[:64], 1e6 ** (-2 * np.arange(64) / 512))
    assert not freq[64:].any()


def test_llama3_frequencies_blend():
    """Short wavelengths stay, long ones are divided by 8, the band in between is blended."""
    spec = RopeSpec(5e5, RopeType.LLAMA3, factor=8.0, original_context=8192)
    plain, scaled = inverse_frequencies(RopeSpec(5e5), 128), inverse_frequencies(spec, 128)
    ratio = scaled / plain
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8)
    band = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(band) and ((band > 1 / 8) & (band < 1)).all()


@pytest.mark.parametrize("partial, moved", [(1.0, [0, 1, 2, 3]), (0.5, [0, 1])])
def test_rotation_turns_pairs_i_and_i_plus_half(partial, moved):
    x = jnp.arange(1.0, 5.0, dtype=jnp.float32).reshape(1, 1, 1, 4)
    cos, sin = rope_tables(RopeSpec(1e4, partial_factor=partial), 4, jnp.array([[2]], jnp.int32))
    got = np.asarray(apply_rope(x, (cos, sin)))[0, 0, 0]
    want = np.arange(1.0, 5.0)
    half = len(moved) // 2
    for i in range(half):
        angle = 2 * 1e4 ** (-2 * i / len(moved))
        a, b = i + 1.0, i + half + 1.0
        want[i], want[i + half] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    np.testing.assert_allclose(got, want, rtol=1e-6)
