"""Token-level tally: exact for every state, also a corrupted one. Vectorised; linear in the pool and in what is owned."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.ledger.schema import MappingTally, PoolTally
from sgl_jax.srt.mem_cache.ledger.source import IntArray, PoolView, RankView

BoolArray = npt.NDArray[np.bool_]


class SlotSet:
    """Slot ids with repetitions: total, distinct, membership. Ids outside the pool's arrays are kept apart, not lost."""

    __slots__ = ("mask", "outside", "total")

    def __init__(self, parts: Iterable[IntArray], limit: int) -> None:
        self.mask: BoolArray = np.zeros(limit, np.bool_)
        self.total = 0
        strays: list[IntArray] = []
        for ids in parts:
            self.total += len(ids)
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
                inside = (ids >= 0) & (ids < limit)
                strays.append(ids[~inside])
                ids = ids[inside]
            self.mask[ids] = True
        self.outside: IntArray = np.unique(np.concatenate(strays)) if strays else np.empty(0, np.int32)

    @property
    def distinct(self) -> int:
        return int(np.count_nonzero(self.mask)) + len(self.outside)

    @property
    def repeats(self) -> int:
        """Occurrences minus distinct."""
        return self.total - self.distinct

    def overlap(self, other: SlotSet) -> int:
        inside = int(np.count_nonzero(self.mask & other.mask))
        return inside + len(np.intersect1d(self.outside, other.outside))

    def difference_size(self, other: SlotSet) -> int:
        """Size of the symmetric difference."""
        inside = int(np.count_nonzero(self.mask ^ other.mask))
        return inside + len(np.setxor1d(self.outside, other.outside))


def lookup(mapping: IntArray, full: IntArray) -> IntArray:
    """Mapped SWA slots of FULL slots; 0 (unmapped) for ids outside the mapping."""
    try:
        return mapping[full.view(np.uint32)]  # a negative id becomes a huge one
    except IndexError:
        inside = (full >= 0) & (full < len(mapping))
        return np.where(inside, mapping[np.where(inside, full, 0)], 0).astype(np.int32, copy=False)


def page_slack(owned: BoolArray, page_size: int) -> int:
    """Unowned slots of the pages that have at least one owner (DECISIONS 12)."""
    if page_size == 1:
        return 0
    usable = len(owned) - len(owned) % page_size
    per_page = owned[:usable].reshape(-1, page_size)
    touched = np.count_nonzero(per_page.any(axis=1))
    return int(touched) * page_size - int(np.count_nonzero(per_page))


def _tally_pool(
    view: PoolView, unlocked: list[IntArray], locked: list[IntArray], requests: list[IntArray]
) -> tuple[PoolTally, SlotSet, SlotSet]:
    """Tally plus the tree's and the requests' slot sets."""
    limit = view.end
    evictable, protected = SlotSet(unlocked, limit), SlotSet(locked, limit)
    tree, rows = SlotSet([*unlocked, *locked], limit), SlotSet(requests, limit)
    tally = PoolTally(
        capacity=view.capacity,
        available=view.available,
        tree_evictable=evictable.distinct,
        tree_protected=protected.distinct,
        request_owned=rows.distinct,
        reserved_page_slack=page_slack(tree.mask | rows.mask, view.page_size),
        duplicate_tree_owner_count=tree.repeats,
        tree_bucket_overlap_count=evictable.overlap(protected),
        duplicate_request_owner_count=rows.repeats,
        request_tree_overlap_count=tree.overlap(rows),
    )
    return tally, tree, rows


def _pair_mismatches(view: RankView) -> int:
    """Node positions whose stored SWA slot differs from the mapping of their FULL slot."""
    wrong = 0
    for node in view.nodes:
        if node.swa is None:
            continue
        full = node.full if node.full is not None else np.empty(0, np.int32)
        shared = min(len(full), len(node.swa))
        wrong += int(np.count_nonzero(lookup(view.mapping, full[:shared]) != node.swa[:shared]))
        wrong += max(len(full), len(node.swa)) - shared
    return wrong


def _tally_mapping(view: RankView, full_owned: BoolArray, swa_owners: SlotSet) -> MappingTally:
    """Mapping health. Mismatches count only positions whose SWA should be live (DECISIONS 13)."""
    mapping = view.mapping
    sources = np.flatnonzero(mapping)
    targets = mapping[sources]
    invalid = (
        (sources < view.full.first)
        | (sources >= view.full.end)
        | (targets < view.swa.first)
        | (targets >= view.swa.end)
    )
    mapped = SlotSet([targets], view.swa.end)
    live = [n.full for n in view.nodes if n.swa is not None and n.full is not None]
    expected = SlotSet([*live, *(r.live for r in view.rows)], view.full.end)
    width = min(len(mapping), view.full.end)
    unmapped = int(np.count_nonzero(expected.mask[:width] & (mapping[:width] == 0)))
    unmapped += int(np.count_nonzero(expected.mask[width:])) + len(expected.outside)
    inside = sources[sources < view.full.end]
    unowned = int(np.count_nonzero(~full_owned[inside])) + (len(sources) - len(inside))
    return MappingTally(
        nonzero_count=len(sources),
        invalid_count=int(np.count_nonzero(invalid)),
        duplicate_count=mapped.repeats,
        source_mismatch_count=unmapped + unowned,
        owner_mismatch_count=mapped.difference_size(swa_owners),
        pair_mismatch_count=_pair_mismatches(view),
    )


def request_swa(view: RankView) -> list[IntArray]:
    """SWA slots each live row owns: mapped peers of the positions at or above its cursor."""
    owned = []
    for row in view.rows:
        slots = lookup(view.mapping, row.live)
        owned.append(slots[slots != 0])
    return owned


def tally_exact(view: RankView) -> tuple[PoolTally, PoolTally, MappingTally]:
    """(full, swa, mapping) of one rank, token by token."""
    free_full = [n.full for n in view.nodes if n.full is not None and not n.full_locked]
    held_full = [n.full for n in view.nodes if n.full is not None and n.full_locked]
    free_swa = [n.swa for n in view.nodes if n.swa is not None and not n.swa_locked]
    held_swa = [n.swa for n in view.nodes if n.swa is not None and n.swa_locked]
    full, tree, rows = _tally_pool(view.full, free_full, held_full, [r.full for r in view.rows])
    requests = request_swa(view)
    swa, _, _ = _tally_pool(view.swa, free_swa, held_swa, requests)
    owners = SlotSet([*free_swa, *held_swa, *requests], view.swa.end)
    return full, swa, _tally_mapping(view, tree.mask | rows.mask, owners)
