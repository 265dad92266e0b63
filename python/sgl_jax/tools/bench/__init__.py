"""``sgl-jax bench``: host costs of the cache and of the scheduler. Nothing here needs a model or a network."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

_USAGE = """usage: sgl-jax bench {cache,no-sharing,scheduler} [flags]

  cache       the cache alone: scaling shapes as gates, CPU times, ratios to another tree
  no-sharing  what the radix cache costs when no prompt shares anything
  scheduler   host time of one decode step with a worker that computes nothing
"""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; each imports what it needs only when it runs."""
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "cache": _cache,
        "no-sharing": _no_sharing,
        "scheduler": _scheduler,
    }
    if not argv or argv[0] not in commands:
        wanted_help = bool(argv) and argv[0] in ("-h", "--help")
        print(_USAGE, file=sys.stdout if wanted_help else sys.stderr, end="")
        return 0 if wanted_help else 2
    return commands[argv[0]](argv[1:])


def _cache(argv: Sequence[str]) -> int:
    from sgl_jax.tools.bench.cache import main as run

    return run(argv)


def _no_sharing(argv: Sequence[str]) -> int:
    from sgl_jax.tools.bench.no_sharing import main as run

    return run(argv)


def _scheduler(argv: Sequence[str]) -> int:
    from sgl_jax.tools.bench.scheduler import main as run

    return run(argv)
