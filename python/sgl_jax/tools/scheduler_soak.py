"""Seeded soak of scheduler and caches: ``python -m sgl_jax.tools.scheduler_soak --seed S --minutes M [--cases N]``.

Every case draws a configuration (route, page, window, ranks, overlap, chunk size, pools, policy) and traffic, and runs a whole
scheduler over a numpy device that knows the right tokens. The first failure ends the run with exit code 1, the case to replay
(``--case``) and, with ``--shrink``, a short list of operations that still fails.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from sgl_jax.test.managers.fuzz.config import ROUTES
from sgl_jax.test.managers.fuzz.runner import case, run_case, shrink

#: A broken build fails everywhere; more than this many failures say nothing new.
MOST_FAILURES = 20


@dataclass
class SoakReport:
    """What a run did. ``digest`` collects every case's outputs: two runs of one seed print the same."""

    seed: int
    cases: int = 0
    seconds: float = 0.0
    totals: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    digests: list[str] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)

    def lines(self) -> list[str]:
        rate = self.cases / self.seconds if self.seconds else 0.0
        head = f"scheduler soak: {self.cases} cases, seed {self.seed}, {self.seconds:.1f} s, {rate:.1f} cases/s, failures {len(self.failures)} {self.failures[:20]}"
        totals = "  " + ", ".join(f"{name} {count}" for name, count in sorted(self.totals.items()))
        ends = "  ends: " + ", ".join(f"{name} {count}" for name, count in sorted(self.ends.items()))
        routes = "  routes: " + ", ".join(f"{name} {count}" for name, count in sorted(self.routes.items()))
        digest = hashlib.sha256("".join(self.digests).encode()).hexdigest()[:16]
        return [head, totals, ends, routes, f"  digest: {digest}"]


def run_one(report: SoakReport, index: int, route: str | None, every: int, want_shrink: bool) -> bool:
    """One case; False when it failed."""
    config, ops = case(report.seed, index, route)
    report.cases += 1
    report.routes[config.route] += 1
    try:
        world = run_case(config, ops, every)
    except Exception as error:
        report.failures.append(index)
        pinned = f" --route {route}" if route else ""
        print(f"FAILED {type(error).__name__}: {error}")
        print("".join(traceback.format_tb(error.__traceback__)[-4:]))
        print(
            f"replay: python -m sgl_jax.tools.scheduler_soak --seed {report.seed} --case {index}{pinned}\n{config!r}",
            flush=True,
        )
        if want_shrink:
            print(f"shrunk: run_case({config!r}, {shrink(config, ops)!r})", flush=True)
        return False
    stats = world.stats
    report.digests.append(world.digest.hexdigest()[:8])
    for name in ("requests", "steps", "retractions", "cached", "flushes"):
        report.totals[name] += getattr(stats, name)
    report.ends.update(stats.ends)
    return True


def soak(args: argparse.Namespace) -> SoakReport:
    report, start, said = SoakReport(args.seed), time.monotonic(), 0.0
    if args.case is not None:
        run_one(report, args.case, args.route, 1, args.shrink)
    index = args.first
    while args.case is None and index < args.first + args.cases and report.seconds < args.minutes * 60:
        alive = run_one(report, index, args.route, args.every, args.shrink)
        index += 1
        report.seconds = time.monotonic() - start
        if not alive and (not args.keep_going or len(report.failures) >= MOST_FAILURES):
            break
        if report.seconds - said >= 60:
            said = report.seconds
            print(report.lines()[0], flush=True)
    report.seconds = time.monotonic() - start
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_jax.tools.scheduler_soak", description="Fuzz the scheduler over all cache routes"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the whole run")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this time")
    parser.add_argument("--cases", type=int, default=1_000_000, help="stop after this many cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--every", type=int, default=37, help="turns between two complete ownership checks")
    parser.add_argument("--route", choices=ROUTES, default=None, help="only this cache route")
    parser.add_argument(
        "--case", type=int, default=None, help="replay this case of the seed, all checks every turn"
    )
    parser.add_argument("--shrink", action="store_true", help="shorten a failing case")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    args = parser.parse_args(argv)
    if args.cases < 1 or args.minutes <= 0 or args.every < 1:
        parser.error("--cases, --minutes and --every must be positive")
    logging.disable(logging.CRITICAL)
    try:
        report = soak(args)
    finally:
        logging.disable(logging.NOTSET)
    print("\n".join(report.lines()))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
