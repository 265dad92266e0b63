"""The fault index names tests that exist and misses no cache fault."""

from __future__ import annotations

from sgl_jax.tools.fault_index import DOC, ids_of, index, rows
from sgl_jax.tools.fault_lines import LINES


def test_every_row_names_existing_tests() -> None:
    found = index()
    for fault, (line, tests) in rows(DOC.read_text()).items():
        assert line == LINES[fault]
        assert tests and set(tests) <= set(found.get(fault, [])), (
            f"{fault}: {set(tests) - set(found.get(fault, []))}"
        )


def test_every_cache_fault_has_a_row() -> None:
    """Those that live in the cache, and the ten of the merged version."""
    listed = rows(DOC.read_text())
    cache = [
        *(f"D{n:02d}" for n in [*range(1, 32), 35, 45, 49, 81, 82, 83, 84]),
        *(f"fault {n}" for n in range(1, 11)),
    ]
    assert [f for f in cache if f not in listed] == []


def test_ids_and_ranges_are_read_from_docstrings() -> None:
    assert ids_of("D01, fault 3: x (D04-D06)") == {"D01", "D04", "D05", "D06", "fault 3"}
