"""Tests of sgl_jax.srt.models."""
