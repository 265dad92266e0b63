"""``sgl-jax make-tiny-model``: a reproducible random checkpoint in HF format, useful without any download."""

from sgl_jax.tools.make_tiny_model.cli import main
from sgl_jax.tools.make_tiny_model.writer import make_tiny_model

__all__ = ["main", "make_tiny_model"]
