"""All mutants; the files they touch are the ones whose mistakes would lose, share or reuse a slot."""

from __future__ import annotations

from sgl_jax.tools.mutants.catalog_allocator import ALLOCATOR
from sgl_jax.tools.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*ALLOCATOR,)
