"""SWA: window slots on the nodes of the FULL tree. A node without them is a tombstone (RFC-0035 section 4).

A value is the image of the node's FULL slots under the rank's mapping, int32 [node length], at most ``ceil_page(W)`` long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    EvictParams,
    IncLockRefResult,
    InsertParams,
    InsertResult,
)
from sgl_jax.srt.mem_cache.errors import Violation
from sgl_jax.srt.mem_cache.page import ceil_page
from sgl_jax.srt.mem_cache.radix_tree.lru import get_and_increase_time_counter
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import (
    ComponentType,
    EvictLayer,
    LRURefreshPhase,
)
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.swa_lock import WindowLocks
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import Tracker, TreeComponent, leaf_pieces
from sgl_jax.srt.mem_cache.window import live_node_limit, refresh_span

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams

IntArray = npt.NDArray[np.int32]
FULL, SWA = ComponentType.FULL, ComponentType.SWA

#: Distance between a cold age and a tick: older than every value that was ever inside a refreshed window.
_COLD = float(2**40)


def cold_age() -> float:
    """Age of a value that no refreshed window has covered yet.

    Such values go first, oldest first; so a long branch loses what lies outside its trailing windows (and outside the windows
    at chunk ends and branch points, which were refreshed) before any branch loses a window it can be matched by (D26).
    """
    return get_and_increase_time_counter() - _COLD


def window_cuts(low: int, high: int, limit: int) -> list[int]:
    """Offsets that cut ``[low, high)`` from its end into pieces of at most ``limit``, ascending, ends excluded."""
    return list(range(high - limit, low, -limit))[::-1]


class SWAComponent(TreeComponent):
    """Tombstones, healing, window cuts, window locks and the SWA order of one tree."""

    component_type: ClassVar[ComponentType] = SWA

    def __init__(self, cache: Any, params: CacheInitParams | None = None) -> None:
        """Raises ValueError unless ``params.sliding_window_size`` is positive."""
        super().__init__(cache, params)
        window = None if params is None else params.sliding_window_size
        if window is None or window <= 0:
            raise ValueError(
                f"sliding_window_size={window}: the SWA component needs a positive window (keys a query sees, itself "
                f"included); take it from the model's configuration"
            )
        assert params is not None
        self.sliding_window_size: int = int(window)
        self._limit = live_node_limit(self.sliding_window_size, params.page_size)
        self._refresh = refresh_span(self.sliding_window_size, params.page_size)
        self._locks = WindowLocks(self.cache, self.sliding_window_size)

    # -- match ---------------------------------------------------------------------------------------------------------

    def create_match_validator(self, match_device_only: bool = False) -> Callable[[UnifiedTreeNode], bool]:
        """Valid with ``W`` live tokens up to the node's end, or with no gap from the root. Every tombstone restarts (D09)."""
        window = self.sliding_window_size
        live: float = float("inf")

        def valid(node: UnifiedTreeNode) -> bool:
            nonlocal live
            value = node.component_data[SWA].value
            if value is None:
                live = 0
                return False
            live += len(value)
            return live >= window

        return valid

    def can_end_match(self, node: UnifiedTreeNode) -> bool:
        """A tombstone cannot, whatever stands above it."""
        return node.component_data[SWA].value is not None

    def refresh_lru(self, phase: LRURefreshPhase, node: UnifiedTreeNode, root_node: UnifiedTreeNode) -> None:
        """Stamp the last ``W + P`` logical tokens above the endpoint, the endpoint youngest (DECISIONS 2, D13, D25).

        Tombstones use up the budget and get no stamp. Nodes below the endpoint and the walk-down are left alone.
        """
        if phase is LRURefreshPhase.WALKDOWN:
            return
        budget = self._refresh
        fresh: list[UnifiedTreeNode] = []
        at = node
        while budget > 0 and at is not root_node and at.parent is not None:
            if at.component_data[SWA].value is not None:
                fresh.append(at)
            budget -= at.key.length
            at = at.parent
        accounts = self.cache.accounts
        for at in reversed(fresh):
            at.component_data[SWA].age = get_and_increase_time_counter()
            accounts.refile(at, SWA)

    # -- insert --------------------------------------------------------------------------------------------------------

    def _donated_from(self, start: int, length: int, params: InsertParams) -> int:
        """Offset into a node ``[start, start + length)`` from which the request's slots carry SWA and are its own.

        The request owns ``[prev_prefix_len, ..)`` and has SWA from ``swa_evicted_seqlen`` on (D17); rounded up to pages.
        """
        boundary = max(params.swa_evicted_seqlen, params.prev_prefix_len)
        return min(max(ceil_page(boundary, self.cache.page_size) - start, 0), length)

    def update_component_on_insert_overlap(
        self,
        node: UnifiedTreeNode,
        prefix_len: int,
        total_prefix_len: int,
        value_slice: IntArray,
        params: InsertParams,
    ) -> int:
        """Heal a tombstone (RFC-0035 section 4). ``b = max(cursor, prev_prefix_len)`` in a node ``[s, e)``::

        b <= s      [s, e) adopted                                  returns 0
        s < b < e   split at b: [s, b) stays tombstone, [b, e) adopted   returns b - s; ``node`` is the suffix
        b >= e      stays tombstone                                 returns prefix_len
        live node   nothing to heal                                 returns prefix_len
        """
        if node.component_data[SWA].value is not None:
            return prefix_len
        first = self._donated_from(total_prefix_len, prefix_len, params)
        if first >= prefix_len:
            return prefix_len
        if first > 0:
            self.cache.cut_node(node, (first,))
        self._adopt(node, value_slice[first:prefix_len])
        return first

    def _adopt(self, node: UnifiedTreeNode, fresh: IntArray) -> None:
        """Heal ``node`` with the request's slots ``fresh``::

            FULL unlocked   old FULL → free            fresh FULL + SWA → node
            FULL locked     old FULL stays             SWA of fresh → old FULL (mapping), fresh FULL → free   (rule 1)

        A tombstone owns no SWA and no mapping, so healing frees FULL slots only (D15, D16).
        """
        applier, rank = self.cache.applier, self.rank_of(node)
        old: IntArray = node.full_data.value
        if node.full_data.locked:
            applier.move_mapping(fresh, old, rank)
            swa = applier.translate(old, rank)
        else:
            swa = applier.translate(fresh, rank)
            applier.free_full(old, rank)
            self.cache.accounts.set_value(node, FULL, np.array(fresh, np.int32))
        self._make_live(node, 0, swa)
        self.cache.note_event(rank, "tombstone_healed_total", 1, len(fresh))

    def _make_live(self, node: UnifiedTreeNode, live_from: int, swa: IntArray) -> None:
        """Give ``node`` SWA from offset ``live_from`` on, cut at the cursor first, then from the end (DECISIONS 4, 5)::

        [0, live_from)         one tombstone
        [live_from, length)    pieces of at most ceil_page(W); ``node`` itself is the last

        The pieces are cold until the insert ends and refreshes its trailing window.
        """
        cuts = [live_from] if live_from else []
        cuts += window_cuts(live_from, node.key.length, self._limit)
        if not cuts:
            self._give_window(node, swa)
            return
        pieces = [*self.cache.cut_node(node, cuts), node]
        offset = live_from
        for piece in pieces[1:] if live_from else pieces:
            size = piece.key.length
            self._give_window(piece, swa[offset - live_from : offset - live_from + size])
            offset += size

    def _give_window(self, node: UnifiedTreeNode, swa: IntArray) -> None:
        """A whole tombstone becomes live, and cold; the value is a copy."""
        node.component_data[SWA].age = cold_age()  # filed by set_value
        self.cache.accounts.set_value(node, SWA, swa.copy())

    def should_skip_leaf_creation(self, total_prefix_len: int, key_len: int, params: InsertParams) -> bool:
        """A leaf wholly below the cursor would be an unmatchable tombstone."""
        return params.swa_evicted_seqlen >= key_len

    def leaf_cuts(self, start: int, end: int, params: InsertParams) -> list[int]:
        """At the cursor first, then into pieces of at most ``ceil_page(W)`` from the end (DECISIONS 4, 5)."""
        live_from = min(max(start, self._cursor(params)), end)
        cuts = [live_from] if start < live_from < end else []
        return cuts + window_cuts(live_from, end, self._limit)

    def _cursor(self, params: InsertParams) -> int:
        """The request has SWA from here on, in whole pages (D17)."""
        return ceil_page(params.swa_evicted_seqlen, self.cache.page_size)

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: InsertParams, result: InsertResult
    ) -> None:
        """A new leaf ``[s, e)``: ``[s, cursor)`` → tombstone, ``[max(s, cursor), e)`` → live pieces (D17)."""
        if not is_new_leaf:
            return
        assert params.value is not None
        start, end, rank = result.prefix_len, node.path_len(), self.rank_of(node)
        live_from = min(max(start, self._cursor(params)), end)
        if live_from > start:
            self.cache.note_event(rank, "tombstone_created_total", 1, live_from - start)
        if live_from == end:
            return
        swa = self.cache.applier.translate(params.value[live_from:end], rank)
        for piece, low, high in leaf_pieces(node, live_from):
            if low >= live_from and high - low <= self._limit:
                self._give_window(piece, swa[low - live_from : high - live_from])
            else:  # a leaf by hand, not cut yet
                self._make_live(
                    piece, max(live_from - low, 0), swa[max(low - live_from, 0) : high - live_from]
                )

    def recover_after_unevict(
        self, node: UnifiedTreeNode, prefix_len: int, total_prefix_len: int, params: InsertParams
    ) -> None:
        """The FULL half comes back from a request: the SWA half too, from where the request still has it."""
        if params.value is None or node.component_data[SWA].value is not None:
            return
        first = self._donated_from(total_prefix_len, prefix_len, params)
        if first < prefix_len:
            fresh = params.value[total_prefix_len + first : total_prefix_len + prefix_len]
            self._make_live(node, first, self.cache.applier.translate(fresh, self.rank_of(node)))
            self.cache.note_event(self.rank_of(node), "tombstone_healed_total", 1, len(fresh))

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """As the default; the lock boundary moves to the new parent, which is where a lock walking up completes."""
        super().redistribute_on_node_split(new_parent, child)
        lower = child.component_data[SWA]
        new_parent.component_data[SWA].boundary, lower.boundary = lower.boundary, None

    # -- eviction --------------------------------------------------------------------------------------------------------

    def evict_component(
        self, node: UnifiedTreeNode, target: EvictLayer = EvictLayer.DEVICE
    ) -> tuple[int, int]:
        """SWA slots → free, mapping cleared, the node becomes a tombstone; FULL and the tree keep theirs."""
        value = node.component_data[SWA].value
        if value is None or target is EvictLayer.HOST:
            return 0, 0
        rank = self.rank_of(node)
        self.cache.applier.free_swa(node.full_data.value, rank)
        self.cache.accounts.set_value(node, SWA, None)
        self.cache.note_event(rank, "swa_evicted_total", len(value))
        return len(value), 0

    def eviction_priority(self, is_leaf: bool) -> int:
        return 0 if is_leaf else 1

    def drive_eviction(self, params: EvictParams, tracker: Tracker) -> None:
        """Oldest value first: a free leaf goes whole, every other node (internal or FULL-locked, D22) becomes a tombstone."""
        rank = params.dp_rank or 0
        accounts = self.cache.accounts
        while tracker[SWA] < params.swa_num_tokens:
            node = accounts.oldest(SWA, rank)
            if node is None:
                return
            if accounts.is_leaf(node):
                self.cache._evict_device_leaf(node, tracker)
            else:
                gone = self.evict_component(node)[0]
                tracker[SWA] += gone
                self.cache.note_event(rank, "tombstone_created_total", 1, gone)

    # -- locks -----------------------------------------------------------------------------------------------------------

    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: IncLockRefResult, lock_host: bool = False
    ) -> IncLockRefResult:
        """The window that ends at ``node``, whole nodes (DECISIONS 4)."""
        return self._locks.acquire(node, result)

    def release_component_lock(
        self, node: UnifiedTreeNode, params: DecLockRefParams | None, lock_host: bool = False
    ) -> None:
        self._locks.release(node, params)

    def cut_lock(self, node: UnifiedTreeNode, params: DecLockRefParams) -> bool:
        """A lock of whole nodes holds up to two windows; cut where the window ends it holds ``ceil_page(W)`` live tokens."""
        if sum(high - low for low, high in params.swa_spans or ()) <= self._limit:
            return False
        covered, at, boundary = 0, node, node
        while at.parent is not None and covered < self._limit:
            value = at.component_data[SWA].value
            if value is not None:
                covered, boundary = covered + len(value), at
            at = at.parent
        if covered > self._limit:
            self.cache.cut_node(boundary, (covered - self._limit,))
        return True

    # -- requests --------------------------------------------------------------------------------------------------------

    def prepare_for_caching_req(
        self, req: Any, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """The reclaim cursor travels with every insert (D17)."""
        insert_params.swa_evicted_seqlen = int(getattr(req, "swa_evicted_seqlen", 0))
        return None

    # -- invariants ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._locks.clear()

    def check_nodes(self, nodes: Sequence[UnifiedTreeNode]) -> list[Violation]:
        """Live nodes are window-bounded; lock counts are what the outstanding receipts say."""
        out: list[Violation] = []
        expected = self._locks.expected_counts()
        for node in nodes:
            data = node.component_data[SWA]
            if data.value is not None and len(data.value) > self._limit:
                detail = f"live node {node.id} has {len(data.value)} tokens, limit {self._limit}"
                out.append(Violation("swa_node_too_long", node.rank, "swa", detail, (node.id,)))
            if data.lock_ref != expected.get(node.id, 0):
                detail = (
                    f"node {node.id} counts {data.lock_ref} locks, receipts say {expected.get(node.id, 0)}"
                )
                out.append(Violation("swa_lock_count", node.rank, "swa", detail, (node.id,)))
        return out
