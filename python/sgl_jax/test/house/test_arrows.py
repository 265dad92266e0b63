"""The import arrows of docs/architecture.md: a lower room never imports a higher one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2]

# Higher numbers build on lower ones. The longest matching prefix counts.
FLOORS = {
    "sgl_jax.srt.utils": 0,
    "sgl_jax.srt.mem_cache": 20,
    "sgl_jax.srt.mem_cache.page": 10,
    "sgl_jax.srt.mem_cache.window": 11,
    "sgl_jax.srt.mem_cache.errors": 10,
    "sgl_jax.srt.mem_cache.sizing": 12,
    "sgl_jax.srt.mem_cache.radix_tree": 12,
    "sgl_jax.srt.mem_cache.cache_init_params": 12,
    "sgl_jax.srt.mem_cache.base_prefix_cache": 13,
    "sgl_jax.srt.mem_cache.request_view": 14,
    "sgl_jax.srt.mem_cache.memory_pool": 15,
    "sgl_jax.srt.mem_cache.allocator": 16,
    "sgl_jax.srt.mem_cache.unified_cache_components": 17,
    "sgl_jax.srt.mem_cache.unified_radix_cache": 18,
    "sgl_jax.srt.mem_cache.radix_cache": 18,
    "sgl_jax.srt.mem_cache.swa_radix_cache": 18,
    "sgl_jax.srt.mem_cache.chunk_cache": 18,
    "sgl_jax.srt.mem_cache.common": 19,
    "sgl_jax.srt.mem_cache.ledger": 20,
    "sgl_jax.srt.mem_cache.registry": 21,
    "sgl_jax.srt.mem_cache.kv_cache_builder": 22,
    "sgl_jax.srt.kernels": 30,
    "sgl_jax.srt.layers": 31,
    "sgl_jax.srt.models": 32,
    "sgl_jax.srt.model_executor": 40,
    "sgl_jax.srt.managers": 50,
    "sgl_jax.srt.entrypoints": 60,
    "sgl_jax.launch_server": 70,
    "sgl_jax.evidence": 80,
    "sgl_jax.tools": 80,
    "sgl_jax.cli": 90,
}
# Flags and model configs are plain values that any floor above the caches may read.
VALUES = (
    "sgl_jax.srt.server_args",
    "sgl_jax.srt.configs",
    "sgl_jax.srt.speculative",
    "sgl_jax.srt.hf_transformers_utils",
)
# A method the seam demands on the cache itself delegates upward at call time.
CALL_TIME = {
    ("sgl_jax.srt.mem_cache.unified_radix_cache", "sgl_jax.srt.mem_cache.ledger"),
    ("sgl_jax.srt.mem_cache.swa_radix_cache", "sgl_jax.srt.mem_cache.ledger"),
    ("sgl_jax.srt.mem_cache.chunk_cache", "sgl_jax.srt.mem_cache.ledger"),
}


def floor_of(module: str) -> int | None:
    best = max((p for p in FLOORS if module == p or module.startswith(p + ".")), key=len, default=None)
    return None if best is None else FLOORS[best]


def prefix_of(module: str) -> str:
    return max((p for p in FLOORS if module == p or module.startswith(p + ".")), key=len, default=module)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def runtime_imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module, inside a function?) for every import that runs; TYPE_CHECKING blocks do not."""
    tree = ast.parse(path.read_text())
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, in_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    visit(other, in_function)
            elif isinstance(child, ast.Import):
                found.extend((alias.name, in_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
                found.append((child.module, in_function))
            else:
                visit(child, in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(tree, False)
    return found


SOURCES = sorted(p for p in PACKAGE.rglob("*.py") if "test" not in p.relative_to(PACKAGE).parts[:1])


def test_no_arrow_runs_back():
    wrong = []
    for path in SOURCES:
        module = module_name(path)
        mine = floor_of(module)
        for target, lazy in runtime_imports(path):
            theirs = floor_of(target)
            if mine is None or theirs is None or target.startswith(VALUES):
                continue
            if lazy and (prefix_of(module), prefix_of(target)) in CALL_TIME:
                continue
            if theirs > mine:
                wrong.append(f"{module} (floor {mine}) imports {target} (floor {theirs})")
    assert wrong == []


@pytest.mark.parametrize("outside", ["sgl_jax.evidence", "sgl_jax.tools", "sgl_jax.test"])
def test_the_server_does_not_know_what_stands_outside(outside):
    srt = [p for p in SOURCES if p.relative_to(PACKAGE).parts[0] == "srt"]
    wrong = [module_name(p) for p in srt for target, _ in runtime_imports(p) if target.startswith(outside)]
    assert wrong == []


def test_relative_imports_are_not_used():
    wrong = [
        module_name(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert wrong == []
