"""Tests of sgl_jax.srt.layers."""
