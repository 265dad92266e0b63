"""A device that remembers what was written where and that poisons every slot the moment its owner gives it up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sgl_jax.test.oracle.pool import DualOracle, Mismatch

POISON = -1
_MOD = (1 << 61) - 1


def extend_tags(tags: list[int], tokens: Sequence[int]) -> None:
    """One tag per position: a hash of the whole prefix up to and including it, so equal tags mean equal KV."""
    h = tags[-1] if tags else 1
    for token in tokens:
        h = (h * 1_000_003 + token + 7) % _MOD
        tags.append(h)


class PoisonedDevice:
    """Two arrays of tags per rank. Steps run in launch order, so reads are checked when a step is launched."""

    def __init__(self, pools: list[DualOracle]) -> None:
        self.full = [np.full((p.full.pages + 1) * p.page_size, POISON, np.int64) for p in pools]
        self.swa = [np.full((p.swa.pages + 1) * p.page_size, POISON, np.int64) for p in pools]
        for rank, pool in enumerate(pools):
            pool.full.on_release = self._poisoner(self.full[rank])
            pool.swa.on_release = self._poisoner(self.swa[rank])

    @staticmethod
    def _poisoner(store: np.ndarray):  # type: ignore[no-untyped-def,type-arg]
        def poison(slots: Iterable[int]) -> None:
            store[list(slots)] = POISON

        return poison

    def launch(
        self,
        rank: int,
        row: np.ndarray,
        mapping: np.ndarray,
        tags: Sequence[int],
        start: int,
        end: int,
        window: int,
    ) -> None:  # type: ignore[type-arg]
        """One forward step of one request: writes ``[start, end)``, then reads what attention would read.

        FULL layers read ``[0, end)``; SWA layers read the last ``window`` keys of every query in ``[start, end)``.
        """
        want = np.asarray(tags[:end], np.int64)
        full = row[:end]
        first = max(0, start - window + 1)
        swa = mapping[full[first:]]
        if (swa == 0).any() or (full == 0).any():
            raise Mismatch(
                f"[dp={rank}] row position inside the window is unmapped: {np.flatnonzero(swa == 0)[:4] + first}"
            )
        self.full[rank][full[start:]] = want[start:]
        self.swa[rank][swa[start - first :]] = want[start:]
        self._compare("full", rank, self.full[rank][full], want, 0)
        self._compare("swa", rank, self.swa[rank][swa], want[first:], first)

    @staticmethod
    def _compare(pool: str, rank: int, got: np.ndarray, want: np.ndarray, base: int) -> None:  # type: ignore[type-arg]
        bad = np.flatnonzero(got != want)
        if bad.size:
            what = "a freed slot" if got[bad[0]] == POISON else "another prefix"
            raise Mismatch(
                f"[dp={rank}][{pool}] position {bad[0] + base} reads {what} ({bad.size} positions)"
            )
