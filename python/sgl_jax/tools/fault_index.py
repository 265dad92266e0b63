"""Writes ``docs/faults.md``: every fault id named in a test docstring, one line about it, and the tests.

``python -m sgl_jax.tools.fault_index`` reports ids without a row and rows without a test; ``--write`` renews the document.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sgl_jax.tools.fault_lines import LINES

PACKAGE = Path(__file__).resolve().parents[1]
TESTS = PACKAGE / "test"
DOC = PACKAGE.parents[1] / "docs" / "faults.md"
_SHOWN = 4
HEAD = """# Faults that this implementation must not have

Classes of faults that users of such serving caches reported (D01-D86), and the ten found in the merged version of the
feature (fault 1-10), each with the tests that name it in their docstring (paths below `python/sgl_jax/test/`). Written by
`python -m sgl_jax.tools.fault_index --write`; a test keeps the table true. D52-D54 and D86 have no row: they are about host
transfers and multi-host steps, which this release does not have.

| id | what must never happen | tests |
|---|---|---|"""
_ID = re.compile(r"\bD\d\d\b(?!-)")
_RANGE = re.compile(r"\bD(\d\d)\s*[-–]\s*D?(\d\d)\b")
_ROW = re.compile(r"^\| (D\d\d|fault \d+) \| (.*?) \| (.*) \|$")
_FAULT = re.compile(r"\b[Ff]ault (\d+)\b")


def test_functions(root: Path = TESTS) -> Iterator[tuple[str, str]]:
    """(``path::name``, docstring) of every test function and method; paths relative to ``test``."""
    for path in sorted(root.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(root).as_posix()}::{node.name}", ast.get_docstring(node) or ""


def ids_of(docstring: str) -> set[str]:
    """Fault ids a docstring names; ranges are expanded."""
    found = set(_ID.findall(docstring)) | {f"fault {n}" for n in _FAULT.findall(docstring)}
    for first, last in _RANGE.findall(docstring):
        found |= {f"D{n:02d}" for n in range(int(first), int(last) + 1)}
    return found


def index() -> dict[str, list[str]]:
    """Fault id -> tests that name it."""
    out: dict[str, list[str]] = {}
    for name, doc in test_functions():
        for fault in ids_of(doc):
            out.setdefault(fault, []).append(name)
    return out


def rows(text: str) -> dict[str, tuple[str, list[str]]]:
    """Fault id -> (line, tests) of the document's table rows."""
    out: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        if match := _ROW.match(line):
            out[match[1]] = (match[2], re.findall(r"`([^`]+::[^`]+)`", match[3]))
    return out


def document(found: dict[str, list[str]]) -> str:
    """The whole document: one row per fault that has a test (at most four tests a row)."""
    lines = [HEAD]
    for fault, line in LINES.items():
        if fault in found:
            tests = ", ".join(f"`{t}`" for t in found[fault][:_SHOWN])
            lines.append(f"| {fault} | {line} | {tests} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_jax.tools.fault_index", description="Index of tested faults"
    )
    parser.add_argument("--write", action="store_true", help="rewrite the test column of docs/faults.md")
    args = parser.parse_args(argv)
    found = index()
    if args.write:
        DOC.write_text(document(found))
    listed = rows(DOC.read_text())
    for fault in sorted(set(found) - set(listed)):
        print(f"no row: {fault} ({', '.join(found[fault][:3])})")
    for fault in sorted(set(listed) - set(found)):
        print(f"no test: {fault}")
    return 1 if set(found) ^ set(listed) else 0


if __name__ == "__main__":
    sys.exit(main())
