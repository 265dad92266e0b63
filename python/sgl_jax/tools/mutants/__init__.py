"""Mutation check of the cache: small wrong edits that the fast suite must notice (``python -m sgl_jax.tools.mutants``)."""

from sgl_jax.tools.mutants.catalog import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant"]
