"""Each mutant of the catalogue still fits the code exactly once and changes it."""

from __future__ import annotations

import ast

from sgl_jax.tools.mutants import MUTANTS
from sgl_jax.tools.mutants.mutant import PACKAGE_ROOT


def test_every_snippet_fits_exactly_once() -> None:
    misfits = [(m.name, m.occurrences()) for m in MUTANTS if m.occurrences() != 1]
    assert misfits == []


def test_every_mutation_is_valid_python_and_changes_something() -> None:
    for mutant in MUTANTS:
        text = (PACKAGE_ROOT / mutant.file).read_text()
        changed = text.replace(mutant.old, mutant.new)
        assert changed != text, mutant.name
        ast.parse(changed)


def test_there_are_at_least_forty_under_distinct_names() -> None:
    assert len(MUTANTS) >= 40 and len({m.name for m in MUTANTS}) == len(MUTANTS)
