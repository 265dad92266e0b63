"""RadixCache: prefix cache of models with one kind of attention, flag off (RFC-0035 section 7, "existing behavior").

A path-compressed tree of whole pages per rank; a node owns its FULL slots. Independent of the Unified code. The seam's
helper names (``RadixKey``, ``get_child_key``, ``_key_match_*``, ``build_radix_key``) live here too.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    IntArray,
    MatchPrefixParams,
    MatchResult,
)
from sgl_jax.srt.mem_cache.errors import LockReceiptError, TreeInvariantError, Violation
from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, get_child_key, packed_child_key
from sgl_jax.srt.mem_cache.radix_tree.node_ids import NumberedNodes
from sgl_jax.srt.mem_cache.radix_tree.request_key import build_radix_key

__all__ = ["CandidateQueue", "RadixCache", "RadixKey", "TreeNode", "build_radix_key", "get_child_key"]

_EMPTY: IntArray = np.empty((0,), np.int32)
next_stamp: Callable[[], int] = itertools.count(1).__next__


# ------------------------------------------------------------------------------------------------------- key helpers
def _check_namespace(k0: RadixKey, k1: RadixKey) -> None:
    if k0.extra_key != k1.extra_key or k0.dp_rank != k1.dp_rank:
        raise ValueError(
            f"keys of different namespaces: extra_key {k0.extra_key!r} / {k1.extra_key!r}, "
            f"dp_rank {k0.dp_rank!r} / {k1.dp_rank!r}; look up each key in its own namespace"
        )


def _key_match_page_size1(k0: RadixKey, k1: RadixKey) -> int:
    """Common prefix in tokens. Raises ValueError when the namespaces differ."""
    _check_namespace(k0, k1)
    return k0.match_len(k1)


def _key_match_paged(k0: RadixKey, k1: RadixKey, page_size: int) -> int:
    """Common prefix in tokens, whole pages only. Raises ValueError when the namespaces differ."""
    _check_namespace(k0, k1)
    return floor_page(k0.match_len(k1), page_size)


def _convert_to_bigram_key(token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """EAGLE key: pairs of neighbours; one shorter than the ids, empty below two ids."""
    return list(itertools.pairwise(token_ids))


# --------------------------------------------------------------------------------------------------------------- nodes
class TreeNode(metaclass=NumberedNodes):
    """One edge and its end: ``value`` holds the FULL slots of ``key``, int32 [len(key)]; ordered by recency."""

    __slots__ = (
        "children",
        "hit_count",
        "host_value",
        "id",
        "key",
        "last_access_time",
        "lock_ref",
        "parent",
        "value",
    )

    def __init__(self, id: int | None = None) -> None:
        self.children: dict[Any, TreeNode] = {}
        self.parent: TreeNode | None = None
        self.key: RadixKey = RadixKey([])
        self.value: Any = None
        self.lock_ref = 0
        self.last_access_time = next_stamp()
        self.hit_count = 0
        self.host_value: Any = None
        self.id = TreeNode.take_id(id)

    @property
    def evicted(self) -> bool:
        return self.value is None

    @property
    def backuped(self) -> bool:
        return self.host_value is not None

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access_time < other.last_access_time


class CandidateQueue:
    """Evictable nodes of one rank, least recently used first: a heap with lazy deletion.

    ``add`` and ``discard`` are O(log n) and O(1); ``oldest`` skips stale entries, each paid for by the ``add`` that made
    it stale. The heap is rebuilt when stale entries outnumber live ones, so it never grows with traffic.
    """

    __slots__ = ("_heap", "_stamp")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._stamp: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self._stamp)

    def __contains__(self, node: object) -> bool:
        return node in self._stamp

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._stamp))

    def add(self, node: Any, stamp: int) -> None:
        """Enter ``node`` or renew its recency."""
        if self._stamp.get(node) == stamp:
            return
        self._stamp[node] = stamp
        heapq.heappush(self._heap, (stamp, node.id, node))
        if len(self._heap) > 2 * len(self._stamp) + 64:
            self._heap = [(stamp, node.id, node) for node, stamp in self._stamp.items()]
            heapq.heapify(self._heap)

    def discard(self, node: Any) -> None:
        self._stamp.pop(node, None)

    def oldest(self) -> Any | None:
        """The least recently used candidate, left in place; None when there is none."""
        while self._heap:
            stamp, _, node = self._heap[0]
            if self._stamp.get(node) == stamp:
                return node
            heapq.heappop(self._heap)
        return None


# --------------------------------------------------------------------------------------------------------------- cache
class RadixCache(BasePrefixCache):
    """Prefix cache over one pool. Not thread-safe; the scheduler is its only caller.

    ``insert`` returns the length that was already cached (an int); its caller frees the duplicates of that part.
    """

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        page_size: int = 1,
        disable: bool = False,
        kv_head_num: int = 32,
        head_dim: int = 128,
        layer_num: int = 32,
        max_seq_len: int = 4096,
        dtype: Any = None,
        enable_kv_cache_events: bool = False,
        is_eagle: bool = False,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: a page holds at least one token")
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = page_size
        self.disable = disable
        self.kv_head_num, self.head_dim, self.layer_num = kv_head_num, head_dim, layer_num
        self.max_seq_len, self.dtype = max_seq_len, dtype
        self.enable_kv_cache_events = enable_kv_cache_events
        self.is_eagle = is_eagle
        self._ledger_event_totals: dict[int, dict[str, int]] = {}
        self.get_child_key_fn: Callable[[RadixKey], Any] = lambda key: packed_child_key(key, page_size)
        self.reset()

    # -------------------------------------------------------------------------------------------------------- state
    def reset(self) -> None:
        """Forget the tree without freeing slots; event totals are cumulative and stay."""
        self.root_node = TreeNode()
        self.root_node.value = _EMPTY
        self.root_node.lock_ref = 1
        self.evictable_size_: dict[int, int] = defaultdict(int)
        self.protected_size_: dict[int, int] = defaultdict(int)
        self._leaves: dict[int, CandidateQueue] = defaultdict(CandidateQueue)

    def evictable_size(self, dp_rank: int = 0) -> int:
        return self.evictable_size_.get(dp_rank, 0)

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        return self.evictable_size(dp_rank)

    def protected_size(self, dp_rank: int = 0) -> int:
        return self.protected_size_.get(dp_rank, 0)

    def full_protected_size(self, dp_rank: int = 0) -> int:
        return self.protected_size(dp_rank)

    def total_size(self) -> int:
        return sum(len(node.value) for node in self._nodes())

    def _nodes(self) -> Iterator[TreeNode]:
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _rank(self, node: TreeNode) -> int:
        return node.key.dp_rank or 0

    def _key(self, key: Any) -> RadixKey:
        """A page-aligned key; a list is taken as token ids, an EAGLE cache pairs neighbours."""
        if not isinstance(key, RadixKey):
            key = RadixKey(key if key is not None else [])
        if self.is_eagle and len(key) and not isinstance(key.token_ids[0], tuple):
            key = RadixKey(_convert_to_bigram_key(key.token_ids), key.extra_key, key.dp_rank)
        aligned: RadixKey = key[: floor_page(len(key), self.page_size)]
        return aligned

    # -------------------------------------------------------------------------------------------------------- match
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = self._key(params.key)
        if self.disable or not len(key):
            return MatchResult(_EMPTY, self.root_node, self.root_node, self.root_node)
        node, values = self.root_node, []
        while len(key):
            child = node.children.get(self.get_child_key_fn(key))
            if child is None:
                break
            shared = floor_page(child.key.match_len(key), self.page_size)
            if shared < len(child.key):
                node = self._split_node(child.key, child, shared)
                values.append(node.value)
                break
            values.append(child.value)
            node, key = child, key[shared:]
        self._touch(node)
        return MatchResult(np.concatenate(values) if values else _EMPTY, node, node, node)

    def _touch(self, node: TreeNode) -> None:
        """The path is most recent, its end the least so of none: one stamp for all (D84: siblings keep theirs)."""
        stamp, end = next_stamp(), node
        while node.parent is not None:
            node.last_access_time = stamp
            node = node.parent
        if end in self._leaves[self._rank(end)]:
            self._leaves[self._rank(end)].add(end, stamp)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        """New parent over ``child``'s first ``split_len`` tokens; ``child`` keeps its identity, lock and rest (D81: copies)."""
        upper = TreeNode()
        parent = child.parent
        if parent is None or not 0 < split_len < len(child.key):
            raise TreeInvariantError(
                f"node {child.id} of {len(child.key)} tokens cannot be split at {split_len}"
            )
        upper.parent, upper.lock_ref, upper.hit_count = parent, child.lock_ref, child.hit_count
        upper.last_access_time = child.last_access_time
        upper.key, upper.value = child.key[:split_len].compact(), child.value[:split_len].copy()
        child.key, child.value = child.key[split_len:].compact(), child.value[split_len:].copy()
        child.parent = upper
        upper.children[self.get_child_key_fn(child.key)] = child
        parent.children[self.get_child_key_fn(upper.key)] = upper
        return upper

    # ------------------------------------------------------------------------------------------------------- insert
    def insert(self, params: InsertParams) -> int:
        """Store the key's pages; returns how many leading tokens were there before.

        ::

            [0, returned)        tree kept its own slots; the caller frees its duplicates
            [returned, aligned)  value[...] became tree-owned
        """
        if self.disable:
            return 0
        key = self._key(params.key)
        value = params.value
        if value is None:
            source = params.key.token_ids if isinstance(params.key, RadixKey) else params.key
            value = np.asarray(source if source is not None else [], np.int32)
        node, matched = self.root_node, 0
        while matched < len(key):
            rest = key[matched:]
            child = node.children.get(self.get_child_key_fn(rest))
            if child is None:
                node = self._add_leaf(node, rest, np.array(value[matched : len(key)], np.int32))
                break
            shared = floor_page(child.key.match_len(rest), self.page_size)
            node = child if shared == len(child.key) else self._split_node(child.key, child, shared)
            matched += shared
        self._touch(node)
        return matched

    def _add_leaf(self, parent: TreeNode, key: RadixKey, value: IntArray) -> TreeNode:
        leaf = TreeNode()
        leaf.parent, leaf.key, leaf.value = parent, key.compact(), value
        parent.children[self.get_child_key_fn(key)] = leaf
        rank = self._rank(leaf)
        self._leaves[rank].discard(parent)
        self._leaves[rank].add(leaf, leaf.last_access_time)
        self.evictable_size_[rank] += len(value)
        return leaf

    # ----------------------------------------------------------------------------------------------------- requests
    def _protected(self, req: Any) -> int:
        return int(getattr(req, "cache_protected_len", 0) or 0)

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        """Hand the request's slots to the tree, or free them, and release its lock::

        [0, protected)         tree-owned; unlocked
        [protected, stored)    is_insert: new part tree-owned, duplicates freed; otherwise freed
        [stored, owned end)    freed; the end covers the whole last page of the committed length
        """
        committed = req.pop_committed_kv_cache()
        allocated = int(getattr(req, "kv_allocated_len", committed) or committed)
        end = max(committed, min(ceil_page(committed, self.page_size), allocated))
        row = self.req_to_token_pool.read(req.req_pool_idx, end)
        protected = self._protected(req)
        if self.disable:
            self._free(row, req)
            self._clear_receipt(req)
            return
        key = self._key(build_radix_key(req, committed))
        stored = max(len(key), protected)
        kept = self.insert(InsertParams(key, row[: len(key)])) if is_insert else stored
        self._free(row[protected : max(kept, protected)], req)
        self._free(row[stored:], req)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        req.last_node = self.root_node
        self._clear_receipt(req)

    def cache_unfinished_req(self, req: Any, **kwargs: Any) -> None:
        """Store the computed pages, re-point the row to the tree's slots, then free the duplicates (D35)::

        [0, stored)          tree-owned, locked for the request
        [stored, computed)   request-owned
        """
        computed = len(req.fill_ids)
        row = self.req_to_token_pool.read(req.req_pool_idx, computed)
        key = self._key(build_radix_key(req, computed)) if not self.disable else RadixKey([])
        if not len(key):
            req.prefix_indices = row
            return
        protected = self._protected(req)
        kept = self.insert(InsertParams(key, row[: len(key)]))
        match = self.match_prefix(MatchPrefixParams(key))
        stored = len(match.device_indices)
        self.req_to_token_pool.write(
            (req.req_pool_idx, slice(protected, stored)), match.device_indices[protected:]
        )
        self._free(row[protected : max(kept, protected)], req)
        self.inc_lock_ref(match.last_device_node)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        req.last_node = match.last_device_node
        req.cache_protected_len = req.last_matched_prefix_len = stored
        req.prefix_indices = np.concatenate([match.device_indices, row[stored:]])

    def _free(self, slots: IntArray, req: Any) -> None:
        if len(slots):
            self.token_to_kv_pool_allocator.free(slots, dp_rank=getattr(req, "dp_rank", None) or 0)

    @staticmethod
    def _clear_receipt(req: Any) -> None:
        req.cache_lock_params = None
        req.swa_uuid_for_lock = None

    # ------------------------------------------------------------------------------------------------ locks, eviction
    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Protect the path to the root; ``delta`` is minus the tokens that stopped being evictable."""
        delta = 0
        while not self.disable and node.parent is not None:
            if node.lock_ref == 0:
                rank, size = self._rank(node), len(node.value)
                self.evictable_size_[rank] -= size
                self.protected_size_[rank] += size
                self._leaves[rank].discard(node)
                delta -= size
            node.lock_ref += 1
            node = node.parent
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> int:
        """Release one lock of the path; returns the tokens that became evictable. Raises LockReceiptError below zero."""
        delta = 0
        while not self.disable and node.parent is not None:
            if node.lock_ref <= 0:
                raise LockReceiptError(f"node {node.id} is not locked: its lock was released before")
            if node.lock_ref == 1:
                rank, size = self._rank(node), len(node.value)
                self.evictable_size_[rank] += size
                self.protected_size_[rank] -= size
                if not node.children:
                    self._leaves[rank].add(node, node.last_access_time)
                delta += size
            node.lock_ref -= 1
            node = node.parent
        return delta

    def evict(self, params: EvictParams) -> EvictResult:
        """Free whole unlocked leaves of one rank, least recently used first; cost follows the leaves freed."""
        if self.disable or params.num_tokens <= 0:
            return EvictResult()
        rank = params.dp_rank or 0
        queue, victims, freed = self._leaves[rank], [], 0
        while freed < params.num_tokens and (leaf := queue.oldest()) is not None:
            victims.append(leaf.value)
            freed += len(leaf.value)
            self._remove_leaf(leaf, rank)
        if victims:
            self.token_to_kv_pool_allocator.free(np.concatenate(victims), dp_rank=rank)
            totals = self._ledger_event_totals.setdefault(rank, {})
            totals["full_evicted_total"] = totals.get("full_evicted_total", 0) + freed
        return EvictResult(num_tokens_evicted=freed)

    def _remove_leaf(self, leaf: TreeNode, rank: int) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self.get_child_key_fn(leaf.key)]
        self._leaves[rank].discard(leaf)
        self.evictable_size_[rank] -= len(leaf.value)
        leaf.parent = None
        if parent.parent is not None and not parent.children and parent.lock_ref == 0:
            self._leaves[rank].add(parent, parent.last_access_time)

    # -------------------------------------------------------------------------------------------------------- checks
    def check(self) -> list[Violation]:
        """Structure, counters and candidates against a walk of the tree."""
        found: list[Violation] = []
        evictable: dict[int, int] = defaultdict(int)
        protected: dict[int, int] = defaultdict(int)
        for node in self._nodes():
            rank = self._rank(node)
            (protected if node.lock_ref else evictable)[rank] += len(node.value)
            if not len(node.key) or len(node.key) != len(node.value) or len(node.key) % self.page_size:
                text = f"key {len(node.key)}, value {len(node.value)} tokens at page {self.page_size}"
                found.append(Violation("node_length", rank, "full", text, (node.id,)))
            candidate = not node.children and node.lock_ref == 0
            if candidate != (node in self._leaves.get(rank, ())):
                found.append(
                    Violation("leaf_candidates", rank, "full", f"leaf evictable={candidate}", (node.id,))
                )
        for kind, walked, kept in (
            ("evictable_counter", evictable, self.evictable_size_),
            ("protected_counter", protected, self.protected_size_),
        ):
            for rank in sorted({*walked, *kept}):
                if walked.get(rank, 0) != kept.get(rank, 0):
                    text = f"counter {kept.get(rank, 0)}, nodes {walked.get(rank, 0)}"
                    found.append(Violation(kind, rank, "full", text))
        return found

    def pretty_print(self) -> str:
        """Print and return the tree."""
        text = self.describe()
        print(text)
        return text

    def describe(self) -> str:
        """The tree as text, one node a line: depth, key preview, tokens, locks."""
        lines: list[str] = []
        stack = [(child, 0) for child in self.root_node.children.values()]
        while stack:
            node, depth = stack.pop()
            lines.append(
                f"{'  ' * depth}#{node.id} {node.key!r} tokens={len(node.value)} lock={node.lock_ref}"
            )
            stack.extend((child, depth + 1) for child in node.children.values())
        return "\n".join([*lines, f"total tokens: {self.total_size()}"])
