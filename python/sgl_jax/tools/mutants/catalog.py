"""All mutants; the files they touch are the ones whose mistakes would lose, share or reuse a slot."""

from __future__ import annotations

from sgl_jax.tools.mutants.catalog_allocator import ALLOCATOR
from sgl_jax.tools.mutants.catalog_request import REQUEST
from sgl_jax.tools.mutants.catalog_tree import EVICT, INSERT, LOCKS, MATCH
from sgl_jax.tools.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*ALLOCATOR, *MATCH, *INSERT, *EVICT, *LOCKS, *REQUEST)
