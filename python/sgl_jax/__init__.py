"""sgl_jax: the unified radix cache and the serving path for hybrid full + sliding-window models."""

__version__ = "0.1.0"
