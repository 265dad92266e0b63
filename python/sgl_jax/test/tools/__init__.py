"""Tests of sgl_jax.tools."""
