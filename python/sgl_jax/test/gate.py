"""Runs a versioned test manifest: ``python -m sgl_jax.test.gate test/manifests/cpu_gate.toml``.

Fails before running anything when a manifest entry does not exist or a test file of the tree is covered by no entry, so that a
forgotten test cannot pass by absence. Skips outside the allowlist fail in ``conftest.py``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

TEST_ROOT = Path("python/sgl_jax/test")


def manifest_paths(manifest: Path) -> list[str]:
    """All paths of the manifest, in order. Raises ValueError for a missing version or a repeated path."""
    data = tomllib.loads(manifest.read_text())
    if not isinstance(data.get("version"), int):
        raise ValueError(f"{manifest}: `version` must be an integer")
    paths = [path for group in data["group"] for path in group["paths"]]
    repeated = sorted({p for p in paths if paths.count(p) > 1})
    if repeated:
        raise ValueError(f"{manifest}: listed twice: {', '.join(repeated)}")
    return paths


def problems(root: Path, paths: list[str]) -> list[str]:
    """What is wrong with the manifest against the tree at ``root``; empty when it is complete."""
    found = [f"manifest entry does not exist: {p}" for p in paths if not (root / p).exists()]
    for test in sorted((root / TEST_ROOT).rglob("test_*.py")):
        rel = test.relative_to(root).as_posix()
        if rel == f"{TEST_ROOT}/test_utils.py":
            continue
        if not any(rel == p or rel.startswith(p.rstrip("/") + "/") for p in paths):
            found.append(f"test file is covered by no manifest entry: {rel}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sgl_jax.test.gate", description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--workers", type=int, default=2, help="pytest-xdist workers (default 2)")
    parser.add_argument("pytest_args", nargs="*", help="passed on to pytest, after --")
    args = parser.parse_args(argv)
    paths = manifest_paths(args.manifest)
    wrong = problems(Path.cwd(), paths)
    if wrong:
        print("\n".join(f"{args.manifest}: {line}" for line in wrong), file=sys.stderr)
        return 2
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(args.workers),
        "--dist",
        "loadfile",
        "--durations=15",
    ]
    return subprocess.run([*command, *args.pytest_args, *paths], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
