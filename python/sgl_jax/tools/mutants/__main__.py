"""``python -m sgl_jax.tools.mutants [--jobs 2] [--minutes M] [--only TEXT]``: exit 0 only when every mutant is killed."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from sgl_jax.tools.mutants.catalog import MUTANTS
from sgl_jax.tools.mutants.runner import SUITE, baseline, run_all


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_jax.tools.mutants", description="Mutation check of the cache"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants judged at the same time")
    parser.add_argument("--minutes", type=float, default=30.0, help="start no mutant after this time")
    parser.add_argument("--only", default="", help="only mutants whose name contains this text")
    parser.add_argument("--list", action="store_true", help="print the catalogue and stop")
    args = parser.parse_args(argv)
    if args.jobs < 1 or args.minutes <= 0:
        parser.error("--jobs and --minutes must be positive")
    chosen = [m for m in MUTANTS if args.only in m.name]
    if not chosen:
        parser.error(f"--only {args.only!r} names no mutant; --list shows all {len(MUTANTS)}")
    if args.list:
        print("\n".join(f"{m.name}  {m.file}" for m in chosen))
        return 0
    sound, tail = baseline(SUITE)
    if not sound:
        print(f"mutants: the suite fails without any mutation\n{tail}")
        return 2
    verdicts = run_all(chosen, args.jobs, args.minutes)
    counts = Counter(v.outcome for v in verdicts)
    killed = counts["killed"] + counts["timeout"]
    print(
        f"mutants: {killed} of {len(verdicts)} killed ({100 * killed / len(verdicts):.1f} %), {dict(counts)}"
    )
    for verdict in verdicts:
        if verdict.outcome not in ("killed", "timeout"):
            print(f"  {verdict.outcome}: {verdict.mutant} {verdict.detail}")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
