"""Window locks: whole nodes from the end up until ``W`` live tokens are covered, and receipts that survive change (rule 3).

What a lock took is remembered as intervals of *distance from the end of the locked node*, in tokens::

                root ─ … ─[ D ]─[  C  ]─[ B: tombstone ]─[   A   ] locked node
    distance      …       24   20      16               8        0
    W = 12: live A (8) + live C (4..)  →  spans ((0, 8), (16, 20)), boundary at C, B skipped

Ends of nodes never move and the locked node keeps its end, so the intervals stay true when A, B or C is split, tombstoned or
healed. Releasing walks up and unlocks the nodes inside the intervals, in any order with other receipts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams, IncLockRefResult, Span
from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import (
    ComponentType,
    next_component_uuid,
)
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import ComponentHost

SWA = ComponentType.SWA


class Grant(NamedTuple):
    """One outstanding lock: its boundary id, the intervals it covers and the tombstones it passed."""

    uuid: int | None
    spans: tuple[Span, ...]
    skipped: tuple[int, ...]


def nodes_in_spans(node: UnifiedTreeNode, spans: tuple[Span, ...]) -> Iterator[UnifiedTreeNode]:
    """Nodes from ``node`` upward that lie inside ``spans`` (ascending, disjoint)."""
    distance = 0
    at = node
    for low, high in spans:
        while distance < high and at.parent is not None:
            if distance >= low:
                yield at
            distance += at.key.length
            at = at.parent


class WindowLocks:
    """The SWA locks of one tree, with a book of what is outstanding per locked node."""

    def __init__(self, host: ComponentHost, window: int) -> None:
        self._host = host
        self._window = window
        self._held: dict[int, tuple[UnifiedTreeNode, list[Grant]]] = {}

    def acquire(self, node: UnifiedTreeNode, result: IncLockRefResult) -> IncLockRefResult:
        """Lock the window that ends at ``node``; fills uuid, skipped ids and spans of ``result``.

        The uuid is None when the root was reached before ``W`` live tokens were found.
        """
        change_lock = self._host.accounts.change_lock
        spans: list[Span] = []
        skipped: list[int] = []
        live = distance = 0
        uuid: int | None = None
        at = node
        while at.parent is not None:
            low, distance = distance, distance + at.key.length
            data = at.component_data[SWA]
            if data.value is None:
                skipped.append(at.id)
            else:
                change_lock(at, SWA, 1)
                live += len(data.value)
                if spans and spans[-1][1] == low:
                    spans[-1] = (spans[-1][0], distance)
                else:
                    spans.append((low, distance))
                if live >= self._window:
                    if data.boundary is None:
                        data.boundary = next_component_uuid()
                    uuid = data.boundary
                    break
            at = at.parent
        grant = Grant(uuid, tuple(spans), tuple(skipped))
        self._held.setdefault(node.id, (node, []))[1].append(grant)
        result.swa_uuid_for_lock = uuid
        result.skip_lock_node_ids[SWA] = skipped
        result.swa_spans = grant.spans
        return result

    def release(self, node: UnifiedTreeNode, params: DecLockRefParams | None) -> None:
        """Release one lock that ends at ``node``. Raises LockReceiptError when ``params`` is not a receipt of such a lock."""
        entry = self._held.get(node.id)
        if entry is None:
            if params is not None and params.swa_spans is not None:
                raise LockReceiptError(
                    f"[dp={node.rank}] no SWA lock ends at node {node.id}: released twice or never taken"
                )
            self._release_by_walk(node, params)
            return
        grant = self._pick(node, entry[1], params)
        for at in nodes_in_spans(node, grant.spans):
            self._host.accounts.change_lock(at, SWA, -1)
        entry[1].remove(grant)
        if not entry[1]:
            del self._held[node.id]

    def _pick(self, node: UnifiedTreeNode, held: list[Grant], params: DecLockRefParams | None) -> Grant:
        uuid = None if params is None else params.swa_uuid_for_lock
        same = [g for g in held if g.uuid == uuid]
        if params is not None and params.swa_spans is not None:
            same = [g for g in same if g.spans == params.swa_spans]
        elif params is not None:
            skipped = tuple(params.skip_lock_node_ids.get(SWA, ()))
            same = [g for g in same if g.skipped == skipped] or same
        if same:
            return same[0]
        wanted = "no parameters" if params is None else f"boundary {uuid}, spans {params.swa_spans}"
        raise LockReceiptError(
            f"[dp={node.rank}] SWA lock at node {node.id} released with {wanted}; outstanding are "
            f"{[(g.uuid, g.spans) for g in held]}. Pass the receipt of inc_lock_ref: result.to_dec_params()"
        )

    def _release_by_walk(self, node: UnifiedTreeNode, params: DecLockRefParams | None) -> None:
        """Hand-built parameters for a lock this book has not seen: up to the boundary id, past the listed tombstones."""
        uuid = None if params is None else params.swa_uuid_for_lock
        skipped = () if params is None else params.skip_lock_node_ids.get(SWA, ())
        taken: list[UnifiedTreeNode] = []
        at = node
        while at.parent is not None:
            data = at.component_data[SWA]
            if data.value is not None and at.id not in skipped:
                taken.append(at)
                if uuid is not None and data.boundary == uuid:
                    break
            at = at.parent
        if any(at.component_data[SWA].lock_ref <= 0 for at in taken):
            raise LockReceiptError(
                f"[dp={node.rank}] no SWA lock ends at node {node.id}: released twice or never taken"
            )
        for at in taken:
            self._host.accounts.change_lock(at, SWA, -1)

    def clear(self) -> None:
        """Forget all outstanding locks (the tree was emptied)."""
        self._held.clear()

    def expected_counts(self) -> dict[int, int]:
        """SWA locks per node id as the outstanding receipts have it."""
        counts: dict[int, int] = {}
        for node, grants in self._held.values():
            for grant in grants:
                for at in nodes_in_spans(node, grant.spans):
                    counts[at.id] = counts.get(at.id, 0) + 1
        return counts
