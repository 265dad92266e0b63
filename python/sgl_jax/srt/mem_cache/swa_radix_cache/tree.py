"""Mechanism of the legacy hybrid tree: match, insert, heal, split, lock and evict. Frees nothing itself.

Every operation that gives slots up reports them in :class:`Surrendered`; the cache talks to the allocator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.base_prefix_cache import IntArray
from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.radix_cache import CandidateQueue
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, packed_child_key
from sgl_jax.srt.mem_cache.swa_radix_cache.node import Surrendered, SWATreeNode, next_stamp, next_swa_uuid
from sgl_jax.srt.mem_cache.window import refresh_span


class SWARadixTree:
    """A radix tree whose nodes own FULL slots and, unless tombstoned, the mapped SWA slots.

    Counters per rank: ``full_evictable``/``full_protected`` by ``full_lock_ref``, ``swa_*`` by ``swa_lock_ref`` over live
    nodes. Candidates per rank: FULL = unlocked live leaves; SWA = unlocked live nodes.
    """

    def __init__(self, page_size: int, window: int) -> None:
        self.page_size = page_size
        self.window = window
        self.child_key: Callable[[RadixKey], Any] = lambda key: packed_child_key(key, page_size)
        self.events: dict[int, dict[str, int]] = {}
        self.event_tokens: dict[int, dict[str, int]] = {}
        self.clear()

    def clear(self) -> None:
        """An empty tree; event totals are cumulative and stay."""
        self.root = SWATreeNode()
        self.root.full_lock_ref = self.root.swa_lock_ref = 1
        self.full_evictable: dict[int, int] = defaultdict(int)
        self.full_protected: dict[int, int] = defaultdict(int)
        self.swa_evictable: dict[int, int] = defaultdict(int)
        self.swa_protected: dict[int, int] = defaultdict(int)
        self.full_leaves: dict[int, CandidateQueue] = defaultdict(CandidateQueue)
        self.swa_nodes: dict[int, CandidateQueue] = defaultdict(CandidateQueue)

    def nodes(self) -> Iterator[SWATreeNode]:
        """Every node below the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def count(self, rank: int, name: str, amount: int, tokens: int = 0) -> None:
        """Add to a cumulative total; ``tokens``: how many an event was about."""
        totals = self.events.setdefault(rank, {})
        totals[name] = totals.get(name, 0) + amount
        if tokens:
            sums = self.event_tokens.setdefault(rank, {})
            sums[name] = sums.get(name, 0) + tokens

    # -------------------------------------------------------------------------------------------------------- match
    def descend(self, key: RadixKey) -> list[SWATreeNode]:
        """Nodes that cover the longest cached prefix of a page-aligned key; splits the last one when it is partly covered."""
        path, node, at = [], self.root, 0
        while at < len(key):
            rest = key[at:]
            child = node.children.get(self.child_key(rest))
            if child is None:
                break
            shared = floor_page(child.key.match_len(rest), self.page_size)
            partial = shared < len(child.key)
            node = self.split(child, shared) if partial else child
            path.append(node)
            if partial:
                break
            at += shared
        return path

    def valid_prefix(self, path: list[SWATreeNode]) -> int:
        """How many nodes of a path end a valid match: no gap from the root, or >= W live tokens up to the end (D09)."""
        live: float = float("inf")
        best = 0
        for index, node in enumerate(path):
            live = 0 if node.swa_tombstone else live + len(node.value)
            if live >= self.window:
                best = index + 1
        return best

    def touch(self, node: SWATreeNode) -> None:
        """Renew recency: FULL of the whole path, SWA of the last W + P tokens only (D25); lower nodes are newer."""
        stamp, end, span = next_stamp(), node, refresh_span(self.window, self.page_size)
        window: list[SWATreeNode] = []
        while node.parent is not None:
            node.last_access_time = stamp
            if end.end - node.end < span:
                window.append(node)
            node = node.parent
        for recent in reversed(window):
            recent.swa_last_access_time = next_stamp()
            self._offer_swa(recent)
        self._offer_leaf(end)

    def _offer_leaf(self, node: SWATreeNode) -> None:
        """Make the node a FULL candidate if it is one."""
        if (
            node.parent is not None
            and not node.children
            and not node.full_lock_ref
            and not node.swa_tombstone
        ):
            self.full_leaves[node.rank].add(node, node.last_access_time)

    def _offer_swa(self, node: SWATreeNode) -> None:
        """Make the node an SWA candidate if it is one."""
        if not node.swa_tombstone and not node.swa_lock_ref:
            self.swa_nodes[node.rank].add(node, node.swa_last_access_time)

    def split(self, child: SWATreeNode, length: int) -> SWATreeNode:
        """New parent over the first ``length`` tokens of ``child``; the locks are copied, the uuid moves up (RFC 4)."""
        parent = child.parent
        if parent is None or not 0 < length < len(child.key):
            raise ValueError(f"cannot split node {child.id} of {len(child.key)} tokens at {length}")
        upper = SWATreeNode()
        upper.parent, upper.end = parent, child.end - len(child.key) + length
        upper.swa_tombstone = child.swa_tombstone
        upper.full_lock_ref, upper.swa_lock_ref = child.full_lock_ref, child.swa_lock_ref
        upper.swa_uuid, child.swa_uuid = child.swa_uuid, None
        upper.last_access_time, upper.swa_last_access_time = (
            child.last_access_time,
            child.swa_last_access_time,
        )
        upper.hit_count = child.hit_count
        upper.key, upper.value = child.key[:length].compact(), child.value[:length].copy()
        child.key, child.value = child.key[length:].compact(), child.value[length:].copy()
        child.parent = upper
        upper.children[self.child_key(child.key)] = child
        parent.children[self.child_key(upper.key)] = upper
        self._offer_swa(upper)
        return upper

    # ------------------------------------------------------------------------------------------------------- insert
    def insert(
        self, key: RadixKey, value: IntArray, owned: int, cursor: int
    ) -> tuple[int, SWATreeNode, Surrendered]:
        """Store ``value`` under a page-aligned ``key``; returns (tokens that were cached, last node, surrendered)::

        [0, owned)             tree-owned before, untouched
        overlap, live node     tree keeps its slots; the caller's duplicates -> both
        overlap, tombstone     below max(owned, cursor): duplicates -> both; above: healed, see ``_heal``
        beyond the overlap     below the cursor: a tombstone node; above: a live leaf
        beyond, all < cursor   no leaf could ever match: -> both (the SWA half was given back before)
        """
        path, out = self.descend(key), Surrendered()
        at, boundary = 0, floor_page(max(owned, cursor), self.page_size)
        for node in path:
            self._overlap(node, at, value[at : node.end], owned, boundary, out)
            at = node.end
        matched, last = at, path[-1] if path else self.root
        if matched < len(key):
            fresh = value[matched : len(key)]
            if cursor >= len(key):
                out.both.append(fresh[max(0, owned - matched) :])
            else:
                last = self._add_leaf(
                    last, key[matched:], fresh, floor_page(cursor, self.page_size) - matched
                )
        self.touch(last)
        return matched, last, out

    def _overlap(
        self, node: SWATreeNode, at: int, slots: IntArray, owned: int, boundary: int, out: Surrendered
    ) -> None:
        """One node at [at, node.end) against the caller's slots of the same interval."""
        first_own = max(0, owned - at)
        if first_own >= len(slots):
            return
        if not node.swa_tombstone or boundary >= node.end:
            self._duplicates(node.value[first_own:], slots[first_own:], out)
            return
        cut = boundary - at
        if cut > 0:
            upper = self.split(node, cut)
            self._duplicates(upper.value[first_own:], slots[first_own:cut], out)
        self._heal(node, slots[max(cut, 0) :], out)

    @staticmethod
    def _duplicates(kept: IntArray, slots: IntArray, out: Surrendered) -> None:
        """The caller's slots that are not the tree's own (a slot handed back to the tree it came from is no duplicate)."""
        extra = slots[slots != kept]
        if len(extra):
            out.both.append(extra)

    def _heal(self, node: SWATreeNode, slots: IntArray, out: Surrendered) -> None:
        """A tombstone becomes live from the caller's slots (RFC 4).

        Nobody holds its FULL lock: the node adopts the slots and gives up its old FULL value. Somebody does: a row may
        read the old slots, so they stay, the SWA halves move to them, and the caller's FULL slots go (D16).
        """
        if np.array_equal(node.value, slots):
            pass
        elif node.full_lock_ref == 0:
            out.full.append(node.value)
            node.value = np.array(slots, np.int32)
        else:
            out.moves.append((np.array(slots, np.int32), node.value))
        node.swa_tombstone = False
        node.swa_last_access_time = next_stamp()
        side = self.swa_protected if node.swa_lock_ref else self.swa_evictable
        side[node.rank] += len(node.value)
        self._offer_swa(node)
        self._offer_leaf(node)
        self.count(node.rank, "tombstone_healed_total", 1, len(node.value))

    def _add_leaf(self, parent: SWATreeNode, key: RadixKey, slots: IntArray, dead: int) -> SWATreeNode:
        """Append a leaf whose first ``dead`` tokens (<= 0: none) have no SWA half: a tombstone node above the live leaf."""
        if dead > 0:
            parent = self._attach(parent, key[:dead], slots[:dead], tombstone=True)
            self.count(parent.rank, "tombstone_created_total", 1, dead)
            key, slots = key[dead:], slots[dead:]
        leaf = self._attach(parent, key, slots, tombstone=False)
        self._offer_leaf(leaf)
        return leaf

    def _attach(self, parent: SWATreeNode, key: RadixKey, slots: IntArray, tombstone: bool) -> SWATreeNode:
        node = SWATreeNode()
        node.parent, node.key, node.value = parent, key.compact(), np.array(slots, np.int32)
        node.end = parent.end + len(node.value)
        node.swa_tombstone = tombstone
        parent.children[self.child_key(key)] = node
        self.full_leaves[node.rank].discard(parent)
        self.full_evictable[node.rank] += len(node.value)
        if not tombstone:
            self.swa_evictable[node.rank] += len(node.value)
            self._offer_swa(node)
        return node

    # -------------------------------------------------------------------------------------------------------- locks
    def lock(self, node: SWATreeNode) -> tuple[int, int | None]:
        """Lock FULL up to the root and SWA over whole nodes until >= W tokens; returns (delta, uuid of the boundary).

        ``delta`` is minus the FULL tokens that stopped being evictable; the uuid is None when the root came first.
        Raises AssertionError, before any change, when the window holds a tombstone: such a match is not valid.
        """
        window = self._lock_window(node)
        for held in window:
            if held.swa_tombstone:
                raise AssertionError(
                    f"tombstone node {held.id} inside the window of node {node.id}: not a valid match"
                )
        uuid = None
        if window and node.end - window[-1].end + len(window[-1].value) >= self.window:
            window[-1].swa_uuid = window[-1].swa_uuid or next_swa_uuid()
            uuid = window[-1].swa_uuid
        for held in window:
            if held.swa_lock_ref == 0:
                self.swa_evictable[held.rank] -= len(held.value)
                self.swa_protected[held.rank] += len(held.value)
                self.swa_nodes[held.rank].discard(held)
            held.swa_lock_ref += 1
        delta = 0
        while node.parent is not None:
            if node.full_lock_ref == 0:
                self.full_evictable[node.rank] -= len(node.value)
                self.full_protected[node.rank] += len(node.value)
                self.full_leaves[node.rank].discard(node)
                delta -= len(node.value)
            node.full_lock_ref += 1
            node = node.parent
        return delta, uuid

    def _lock_window(self, node: SWATreeNode) -> list[SWATreeNode]:
        """Whole nodes from ``node`` up until they hold W tokens, or up to the root."""
        window, bottom = [], node.end
        while node.parent is not None:
            window.append(node)
            if bottom - (node.end - len(node.value)) >= self.window:
                break
            node = node.parent
        return window

    def cut_window(self, node: SWATreeNode, uuid: int | None) -> bool:
        """Make the next lock of ``node`` hold at most ceil_page(W) tokens; whether the lock of this receipt holds more.

        Splits the node where the window ends. Locks that are held keep what they hold.
        """
        bottom, window = node.end, self._receipt_window(node, uuid)
        limit = ceil_page(self.window, self.page_size)
        if not window or bottom - (window[-1].end - len(window[-1].value)) <= limit:
            return False
        boundary = next(n for n in window if bottom - (n.end - len(n.value)) >= limit)
        spare = bottom - (boundary.end - len(boundary.value)) - limit
        if spare:
            self.split(boundary, spare)
        return True

    def unlock(self, node: SWATreeNode, uuid: int | None) -> tuple[int, Surrendered]:
        """Release what ``lock`` took; returns (FULL tokens that became evictable, surrendered unmatchable tombstones).

        Checks the whole receipt before it changes anything: LockReceiptError when the boundary is not on the path, was
        left out, or a lock is not held.
        """
        window = self._receipt_window(node, uuid)
        path: list[SWATreeNode] = []
        while node.parent is not None:
            if node.full_lock_ref <= 0:
                raise LockReceiptError(f"node {node.id} holds no FULL lock: its lock was released before")
            path.append(node)
            node = node.parent
        for held in window:
            held.swa_lock_ref -= 1
            if held.swa_lock_ref == 0:
                self.swa_protected[held.rank] -= len(held.value)
                self.swa_evictable[held.rank] += len(held.value)
                self._offer_swa(held)
        delta, out = 0, Surrendered()
        for held in path:
            held.full_lock_ref -= 1
            if held.full_lock_ref == 0:
                self.full_protected[held.rank] -= len(held.value)
                self.full_evictable[held.rank] += len(held.value)
                self._offer_leaf(held)
                delta += len(held.value)
        if path:
            self._drop_dead_ends(path[0], out)
        return delta, out

    def _receipt_window(self, node: SWATreeNode, uuid: int | None) -> list[SWATreeNode]:
        if uuid is None and node.end >= self.window:
            raise LockReceiptError(
                f"node {node.id} was locked with a window boundary; release it with the receipt that inc_lock_ref returned"
            )
        window: list[SWATreeNode] = []
        found = uuid is None
        while node.parent is not None:
            if node.swa_lock_ref <= 0:
                raise LockReceiptError(f"node {node.id} holds no SWA lock: its lock was released before")
            window.append(node)
            if uuid is not None and node.swa_uuid == uuid:
                found = True
                break
            node = node.parent
        if not found:
            raise LockReceiptError(f"window boundary {uuid} is not on the path of the locked node")
        return window

    # ------------------------------------------------------------------------------------------------------ eviction
    def evict(self, rank: int, full_tokens: int, swa_tokens: int) -> tuple[int, int, Surrendered]:
        """Give back whole nodes of one rank, oldest first; returns (FULL, SWA) tokens given back and the slots.

        FULL leaves first (each frees both halves), then SWA nodes: internal ones become tombstones, leaves are removed.
        Tombstone ancestors that lose their last child are removed too: nothing can match them (rule 8).
        """
        out, full, swa = Surrendered(), 0, 0
        while full < full_tokens and (leaf := self.full_leaves[rank].oldest()) is not None:
            gone_full, gone_swa = self._remove(leaf, out)
            full, swa = full + gone_full, swa + gone_swa
        while swa < swa_tokens and (node := self.swa_nodes[rank].oldest()) is not None:
            if node.children or node.full_lock_ref:
                swa += self._bury(node, out)
            else:
                gone_full, gone_swa = self._remove(node, out)
                full, swa = full + gone_full, swa + gone_swa
        if full:
            self.count(rank, "full_evicted_total", full)
        if swa:
            self.count(rank, "swa_evicted_total", swa)
        return full, swa, out

    def _bury(self, node: SWATreeNode, out: Surrendered) -> int:
        """Tombstone: the SWA half goes, FULL stays where it is."""
        node.swa_tombstone = True
        self.swa_evictable[node.rank] -= len(node.value)
        self.swa_nodes[node.rank].discard(node)
        self.full_leaves[node.rank].discard(node)
        out.swa.append(node.value)
        self.count(node.rank, "tombstone_created_total", 1, len(node.value))
        return len(node.value)

    def _remove(self, leaf: SWATreeNode, out: Surrendered) -> tuple[int, int]:
        """Unlink an unlocked leaf and the dead ends above it; returns (FULL, SWA) tokens."""
        parent = leaf.parent
        if parent is None or leaf.children or leaf.full_lock_ref or leaf.swa_lock_ref:
            raise LockReceiptError(
                f"node {leaf.id} is locked, has children or is the root: it cannot be removed"
            )
        size, live = len(leaf.value), 0 if leaf.swa_tombstone else len(leaf.value)
        del parent.children[self.child_key(leaf.key)]
        leaf.parent = None
        self.full_evictable[leaf.rank] -= size
        self.swa_evictable[leaf.rank] -= live
        self.full_leaves[leaf.rank].discard(leaf)
        self.swa_nodes[leaf.rank].discard(leaf)
        (out.both if live else out.full).append(leaf.value)
        self._offer_leaf(parent)
        return size + self._drop_dead_ends(parent, out), live

    def _drop_dead_ends(self, node: SWATreeNode, out: Surrendered) -> int:
        """Remove ``node`` and its ancestors while each is an unlocked childless tombstone; returns FULL tokens."""
        freed = 0
        while node.parent is not None and node.swa_tombstone and not node.children and not node.full_lock_ref:
            parent = node.parent
            del parent.children[self.child_key(node.key)]
            node.parent = None
            self.full_evictable[node.rank] -= len(node.value)
            out.full.append(node.value)
            freed += len(node.value)
            self._offer_leaf(parent)
            node = parent
        return freed
