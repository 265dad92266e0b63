"""House rules a reader can rely on: small files, capabilities instead of classes, a clean lock, true docs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PACKAGE = ROOT / "python" / "sgl_jax"
SRT = PACKAGE / "srt"

MAX_LINES = 600
CLASS_OF_CACHE = re.compile(r"(Cache|Allocator)\b")
# Where a concrete class may be asked for: the route table, the builder, and layout checks of the pools themselves.
MAY_ASK = ("mem_cache/registry.py", "mem_cache/kv_cache_builder.py", "mem_cache/allocator/")


def python_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def test_no_file_is_longer_than_600_lines():
    long = {
        str(p.relative_to(ROOT)): n
        for p in python_files(PACKAGE)
        if (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_no_isinstance_on_caches_or_allocators_outside_the_registry():
    wrong = []
    for path in python_files(SRT):
        rel = path.relative_to(SRT).as_posix()
        if rel.startswith(MAY_ASK):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                asked = ast.unparse(node.args[1])
                if CLASS_OF_CACHE.search(asked):
                    wrong.append(f"{rel}:{node.lineno} isinstance(..., {asked})")
    assert wrong == []


def test_lock_is_hashed_and_names_no_registry():
    lock = (ROOT / "requirements.lock").read_text()
    pins = re.findall(r"^([a-z0-9][a-z0-9._-]*)==\S+", lock, flags=re.M)
    assert len(pins) > 50
    assert "://" not in lock
    for block in re.split(r"^(?=[a-z0-9])", lock, flags=re.M)[1:]:
        assert "--hash=sha256:" in block, block.splitlines()[0]


@pytest.mark.parametrize("doc", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_docs_name_only_things_that_exist(doc):
    """A `path::test` or `module:function` in a doc must resolve; a stale map is worse than none."""
    text = (ROOT / "docs" / doc).read_text()
    wrong = []
    for path, name in re.findall(r"`((?:python|test)/[\w./-]+\.py)(?:::([\w\[\]-]+))?`", text):
        file = ROOT / path
        if not file.exists() or (
            name and not re.search(rf"\b(def|class) {name.split('[')[0]}\b", file.read_text())
        ):
            wrong.append(f"{path}::{name}")
    for module, name in re.findall(r"`((?:srt|tools|evidence|test)(?:/[\w]+)+):([\w.]+)`", text):
        if not _defines(module, name.split(".")[-1]):
            wrong.append(f"{module}:{name}")
    assert wrong == []


def _defines(module: str, name: str) -> bool:
    base = PACKAGE / module
    files = [base.with_suffix(".py")] if base.with_suffix(".py").exists() else python_files(base)
    pattern = re.compile(rf"\b(def|class) {name}\b|^\s*{name}\b\s*[:=]", re.M)
    return any(pattern.search(f.read_text()) for f in files)
