"""Tests of sgl_jax.srt.configs."""
