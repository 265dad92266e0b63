"""``sgl-jax bench cache``: what the cache costs on the host, at three sizes of everything, with the shapes as gates.

Thread CPU time first. The quick suite (at most a minute) runs in one process, the full suite every case in a process of its own.
With ``--tree DIR`` the same cases run on another tree with the same seam, interleaved A B A B; a ratio is the median of the
ratios of each pair. Exit code 1 when a shape gate or a correctness check fails on this tree; seconds never fail anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_jax.tools.bench.cases import CASES, Case
from sgl_jax.tools.bench.report import gate, ratio_rows, render
from sgl_jax.tools.bench.workloads import WORKLOADS

OURS = Path(__file__).resolve().parents[3]
_TIMEOUT_S = 1800


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sgl-jax bench cache", description=__doc__)
    parser.add_argument("--suite", choices=("quick", "full"), default="quick")
    parser.add_argument(
        "--cache", choices=("unified", "legacy"), default="unified", help="which cache (default: unified)"
    )
    parser.add_argument(
        "--case", nargs="+", default=[], metavar="NAME", help="only cases whose name starts so, e.g. G9"
    )
    parser.add_argument("--tree", type=Path, metavar="DIR", help="compare with this tree's python folder")
    parser.add_argument(
        "--tree-cache", choices=("unified", "legacy"), help="cache of the other tree (default: --cache)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="pairs A B with --tree (default: 3)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="also replay a conversation trace (JSON lines)"
    )
    parser.add_argument("--trace-limit", type=int, default=1000, help="requests of the trace (default: 1000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    return parser


def jobs(suite: str, wanted: Sequence[str], trace: Path | None) -> list[str]:
    """``NAME:SIZE`` of every measurement. Raises ValueError when ``wanted`` names no case."""
    found = [f"{c.name}:{size}" for c in CASES for size in (c.quick if suite == "quick" else c.full)]
    found += [f"{w.name}:{w.quick if suite == 'quick' else w.full}" for w in WORKLOADS]
    if trace is not None:
        found.append("G14.trace:0")
    chosen = [job for job in found if not wanted or any(job.startswith(name) for name in wanted)]
    if not chosen:
        names = ", ".join(dict.fromkeys(job.rpartition(":")[0] for job in found))
        raise ValueError(f"--case {' '.join(wanted)}: no such case; one of {names}")
    return chosen


def run_worker(
    root: Path, cache: str, names: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One measuring process; its JSON lines. Raises RuntimeError with its last words when it dies."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("worker.py")),
        "--root",
        str(root),
        "--cache",
        cache,
    ]
    if options.trace is not None:
        command += ["--trace", str(options.trace), "--trace-limit", str(options.trace_limit)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [*command, *names], capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the measuring process of {root} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def collect(
    root: Path, cache: str, names: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All jobs on one tree: one process in the quick suite, one per case in the full suite."""
    if options.suite == "quick":
        return run_worker(root, cache, names, options)
    results: list[dict[str, Any]] = []
    for case in dict.fromkeys(name.rpartition(":")[0] for name in names):
        results += run_worker(root, cache, [n for n in names if n.rpartition(":")[0] == case], options)
    return results


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def _cases(results: Sequence[dict[str, Any]]) -> list[Case]:
    present = {result["case"] for result in results if "case" in result}
    return [case for case in CASES if case.name in present]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write JSON; see the module for the exit code."""
    options = _parser().parse_args(argv)
    try:
        names = jobs(options.suite, options.case, options.trace)
    except ValueError as error:
        print(f"sgl-jax bench cache: {error}", file=sys.stderr)
        return 2
    rounds: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
    other_cache = options.tree_cache or options.cache
    for _ in range(options.repeats if options.tree else 1):
        mine = collect(OURS, options.cache, names, options)
        theirs = collect(options.tree.resolve(), other_cache, names, options) if options.tree else []
        rounds.append((mine, theirs))
    results = rounds[-1][0]
    failures = gate(_cases(results), results)
    print(render(options.cache, environment(), _cases(results), results))
    if options.tree:
        print("\n".join(ratio_rows(rounds)))
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{len(failures)} gate(s) failed" if failures else "all shape gates and correctness checks hold")
    if options.json:
        body = {"environment": environment(), "cache": options.cache, "rounds": rounds, "failures": failures}
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
