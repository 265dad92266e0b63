"""Seeded soak of the cache against the oracle: ``python -m sgl_jax.tools.soak --steps N --seed S --minutes M``.

Worlds of a few hundred operations run one after the other through all configurations. Structure, sums and availability
are compared after every step; free lists, mapping, rows, ``check()`` and the ledger every ``--full-every`` steps and at
the end of every world, where the pools must be cold again. The first violation ends the run with exit code 1, the world's
seed and step, and a shrunk list of operations.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from sgl_jax.test.stateful.build import WorldConfig
from sgl_jax.test.stateful.configs import BIG, SMALL
from sgl_jax.test.stateful.replay import Op, draw_ops, shrink
from sgl_jax.test.stateful.world import World

_BIG_EVERY = 12


@dataclass
class SoakReport:
    """What a run did."""

    seed: int
    steps: int = 0
    worlds: int = 0
    seconds: float = 0.0
    operations: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    configurations: Counter[str] = field(default_factory=Counter)
    failure: str = ""

    def lines(self) -> list[str]:
        rate = self.steps / self.seconds if self.seconds else 0.0
        head = f"soak: {self.steps} steps, {self.worlds} worlds, seed {self.seed}, {self.seconds:.1f} s, {rate:.0f} steps/s"
        ops = "  operations: " + ", ".join(f"{k} {v}" for k, v in sorted(self.operations.items()))
        events = "  pages: " + ", ".join(f"{k} {v}" for k, v in sorted(self.events.items()))
        cfgs = [f"  {label}: {n} steps" for label, n in sorted(self.configurations.items())]
        return [head, ops, events, *cfgs]


def world_config(index: int) -> WorldConfig:
    """Configuration of the ``index``-th world: every twelfth is a big-page one."""
    if index % _BIG_EVERY == _BIG_EVERY - 1:
        return BIG[(index // _BIG_EVERY) % len(BIG)]
    return SMALL[index % len(SMALL)]


def world_ops(seed: int, index: int, length: int) -> list[Op]:
    return draw_ops(random.Random(f"{seed}/{index}"), length)


def run_world(report: SoakReport, index: int, length: int, full_every: int) -> bool:
    """One world; False (with the report's failure filled) at the first violation."""
    cfg = world_config(index)
    ops = world_ops(report.seed, index, length)
    world = World(cfg)
    done = 0
    try:
        for done, (name, a, b, c) in enumerate(ops):
            world.step(name, a, b, c, full_check=done % full_every == 0)
        world.drain()
    except Exception as error:
        report.failure = f"{type(error).__name__}: {error}"
        small = shrink(cfg, ops[: done + 1])
        print(f"VIOLATION {report.failure}")
        print(f"replay: --seed {report.seed} --world {index} (step {done}) in {cfg.label()}")
        print(f"shrunk: run_ops({cfg!r}, {small!r})")
    report.steps += world.steps
    report.worlds += 1
    report.operations.update(world.counts)
    report.events.update(world.tree.events)
    report.configurations[cfg.label()] += world.steps
    return not report.failure


def soak(
    steps: int, seed: int, minutes: float, length: int, full_every: int, quiet: bool = False
) -> SoakReport:
    """Run until ``steps`` or ``minutes`` are reached."""
    report, start, index, said = SoakReport(seed), time.monotonic(), 0, 0.0
    while report.steps < steps and report.seconds < minutes * 60:
        alive = run_world(report, index, length, full_every)
        index += 1
        report.seconds = time.monotonic() - start
        if not alive:
            break
        if not quiet and report.seconds - said >= 30:
            said = report.seconds
            print(report.lines()[0], flush=True)
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_jax.tools.soak", description="Soak the cache against the oracle"
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this many steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the whole run")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    parser.add_argument("--world-length", type=int, default=300, help="operations per world")
    parser.add_argument("--full-every", type=int, default=20, help="steps between two complete comparisons")
    parser.add_argument(
        "--world", type=int, default=None, help="replay this world of the seed only, all checks every step"
    )
    args = parser.parse_args(argv)
    if args.steps < 1 or args.minutes <= 0 or args.world_length < 1 or args.full_every < 1:
        parser.error("--steps, --minutes, --world-length and --full-every must be positive")
    if args.world is not None:
        report = SoakReport(args.seed)
        run_world(report, args.world, args.world_length, 1)
    else:
        report = soak(args.steps, args.seed, args.minutes, args.world_length, args.full_every)
    print("\n".join(report.lines()))
    return 1 if report.failure else 0


if __name__ == "__main__":
    sys.exit(main())
