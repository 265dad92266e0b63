"""SWARadixCache: the legacy hybrid FULL+SWA cache, flag off – baseline and rollback path of RFC-0035.

Independent of the Unified code: own tree, own recency, own locks. Shared are the key, page and window maths and the
allocator. The tree says what was surrendered; :meth:`SWARadixCache._apply` is the one place that frees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

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
    ReclaimSchedule,
)
from sgl_jax.srt.mem_cache.errors import LedgerViolationError, Violation
from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.radix_tree.request_key import build_radix_key
from sgl_jax.srt.mem_cache.swa_radix_cache.checks import check_tree, print_tree
from sgl_jax.srt.mem_cache.swa_radix_cache.node import OpRecord, Surrendered, SWATreeNode
from sgl_jax.srt.mem_cache.swa_radix_cache.tree import SWARadixTree
from sgl_jax.srt.mem_cache.window import reclaim_boundary

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.ledger.source import OwnedNode

_OP_LOG_LENGTH = 1000


class SWARadixCache(BasePrefixCache):
    """Prefix cache over both pools, FULL leaves and SWA windows evicted independently. Scheduler thread only.

    ``insert`` returns how many leading tokens were cached (an int) and frees the duplicates itself: the caller must not.
    """

    #: Chunks are inserted as they finish and become evictable, so only decode reclaims, one step after an interval began.
    reclaim_schedule: ClassVar[ReclaimSchedule | None] = ReclaimSchedule(
        decode_offset=1, decode_offset_overlap=1, on_extend=False
    )

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        sliding_window_size: int,
        page_size: int,
        disable: bool = False,
    ) -> None:
        if not hasattr(token_to_kv_pool_allocator, "free_swa"):
            raise AssertionError(
                f"SWARadixCache needs the dual-pool SWA allocator, got {type(token_to_kv_pool_allocator).__name__}"
            )
        if sliding_window_size is None or sliding_window_size <= 0:
            raise ValueError(
                f"sliding_window_size={sliding_window_size}: a hybrid cache needs a window of at least 1 key"
            )
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: a page holds at least one token")
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.sliding_window_size = sliding_window_size
        self.page_size = page_size
        self.disable = disable
        self._tree = SWARadixTree(page_size, sliding_window_size)
        self.op_log: deque[OpRecord] = deque(maxlen=_OP_LOG_LENGTH)

    # -------------------------------------------------------------------------------------------------------- state
    def reset(self) -> None:
        """Forget the tree; slots are not freed here, event totals are cumulative and stay."""
        self._tree.clear()

    @property
    def root_node(self) -> SWATreeNode:
        return self._tree.root

    @property
    def get_child_key_fn(self) -> Callable[[RadixKey], Any]:
        return self._tree.child_key

    @property
    def full_evictable_size_(self) -> dict[int, int]:
        return self._tree.full_evictable

    @property
    def full_protected_size_(self) -> dict[int, int]:
        return self._tree.full_protected

    @property
    def swa_evictable_size_(self) -> dict[int, int]:
        return self._tree.swa_evictable

    @property
    def swa_protected_size_(self) -> dict[int, int]:
        return self._tree.swa_protected

    @property
    def _ledger_event_totals(self) -> dict[int, dict[str, int]]:
        return self._tree.events

    @property
    def _event_token_totals(self) -> dict[int, dict[str, int]]:
        return self._tree.event_tokens

    def supports_swa(self) -> bool:
        return True

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        return self._tree.full_evictable.get(dp_rank, 0)

    def full_protected_size(self, dp_rank: int = 0) -> int:
        return self._tree.full_protected.get(dp_rank, 0)

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        return self._tree.swa_evictable.get(dp_rank, 0)

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        return self._tree.swa_protected.get(dp_rank, 0)

    def evictable_size(self, dp_rank: int = 0) -> int:
        """The smaller of the two pools: what an allocation in both may count on."""
        return min(self.full_evictable_size(dp_rank), self.swa_evictable_size(dp_rank))

    def protected_size(self, dp_rank: int = 0) -> int:
        raise NotImplementedError("two pools, two answers: ask full_protected_size or swa_protected_size")

    def full_lru_list_evictable_size(self) -> int:
        """FULL tokens of unlocked nodes over all ranks, by a walk."""
        return sum(len(n.value) for n in self._tree.nodes() if not n.full_lock_ref)

    def swa_lru_list_evictable_size(self) -> int:
        """SWA tokens of unlocked live nodes over all ranks, by a walk."""
        return sum(len(n.value) for n in self._tree.nodes() if not n.swa_lock_ref and not n.swa_tombstone)

    def total_size(self) -> tuple[int, int]:
        """(FULL, SWA) tokens of the whole tree, by a walk."""
        full = swa = 0
        for node in self._tree.nodes():
            full += len(node.value)
            swa += 0 if node.swa_tombstone else len(node.value)
        return full, swa

    # ------------------------------------------------------------------------------------------------ keys and ranks
    def _rank(self, rank: int | None, what: str) -> int:
        """Rank of a call. Raises ValueError when it is missing on a server with several ranks."""
        if rank is None:
            dp_size = getattr(self.token_to_kv_pool_allocator, "dp_size", 1)
            if isinstance(dp_size, int) and dp_size > 1:
                raise ValueError(
                    f"{what} without dp_rank on {dp_size} data-parallel ranks: pass the request's dp_rank"
                )
            return 0
        return int(rank)

    def _key(self, key: Any) -> RadixKey:
        """A page-aligned key (D10: aligned before descending); a list is taken as token ids."""
        if not isinstance(key, RadixKey):
            key = RadixKey(key if key is not None else [])
        self._rank(key.dp_rank, "a cache key")
        aligned: RadixKey = key[: floor_page(len(key), self.page_size)]
        return aligned

    # -------------------------------------------------------------------------------------------------- match, insert
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest prefix whose last W tokens have live SWA, or without a gap from the root. May split, frees nothing."""
        key = self._key(params.key)
        root = self._tree.root
        if self.disable or not len(key):
            return MatchResult(np.empty((0,), np.int64), root, root, root)
        path = self._tree.descend(key)
        accepted = path if params.full_only else path[: self._tree.valid_prefix(path)]
        self._log("match", key.dp_rank or 0, len(key), accepted[-1].end if accepted else 0, params.req)
        full_hit = path[-1].end if path else 0
        if not accepted:
            return MatchResult(np.empty((0,), np.int64), root, root, root, full_hit_length=full_hit)
        last = accepted[-1]
        self._tree.touch(last)
        slots = np.concatenate([node.value for node in accepted])
        return MatchResult(slots, last, last, last, full_hit_length=full_hit)

    def insert(self, params: InsertParams) -> int:
        """Store the key's whole pages and free what the tree already had; returns that length.

        The interval table is at :meth:`SWARadixTree.insert`; ``prev_prefix_len`` and ``swa_evicted_seqlen`` are its
        ``owned`` and ``cursor``.
        """
        if self.disable:
            return 0
        key = self._key(params.key)
        value = params.value
        if value is None:
            value = np.asarray(key.token_ids, np.int32)
        matched, _, out = self._tree.insert(
            key, np.asarray(value, np.int32), params.prev_prefix_len, params.swa_evicted_seqlen
        )
        self._apply(out, key.dp_rank or 0)
        self._log("insert", key.dp_rank or 0, len(key), matched)
        return matched

    def _apply(self, out: Surrendered, rank: int) -> None:
        """Hand surrendered slots to the allocator; the only place of this cache that frees tree slots."""
        allocator = self.token_to_kv_pool_allocator
        if out.swa:
            allocator.free_swa(np.concatenate(out.swa), dp_rank=rank)
        for source, target in out.moves:
            allocator.transfer_swa_mapping(source, target, dp_rank=rank)
        if out.full:
            allocator.free_full(np.concatenate(out.full), dp_rank=rank)
        if out.both:
            slots = np.concatenate(out.both)
            if len(slots):
                allocator.free(slots, dp_rank=rank)

    # ----------------------------------------------------------------------------------------------------- requests
    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        """Hand the request's slots to the tree, or free them, and release its lock::

        [0, protected)        tree-owned; unlocked
        [protected, stored)   is_insert: as ``insert``; otherwise freed (D31: never below protected)
        [stored, end)         freed; the end covers the whole last page of the committed length
        """
        committed = req.pop_committed_kv_cache()
        allocated = int(getattr(req, "kv_allocated_len", committed) or committed)
        end = max(committed, min(ceil_page(committed, self.page_size), allocated))
        row = self.req_to_token_pool.read(req.req_pool_idx, end)
        rank = self._rank(getattr(req, "dp_rank", None), "a request")
        if self.disable:
            self._free(row, rank)
            self._clear_receipt(req)
            return
        protected, cursor = self._owned_from(req)
        key = self._key(build_radix_key(req, committed))
        stored = max(len(key), protected)
        if is_insert:
            self.insert(InsertParams(key, row[: len(key)], protected, cursor))
        else:
            self._free(row[protected:stored], rank)
        self._free(row[stored:], rank)
        self._release(req)
        req.last_node = self._tree.root
        self._clear_receipt(req)

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        """Store the computed pages, re-point the row, exchange the lock receipt::

            [0, stored)          tree-owned, locked for the request; the row reads the tree's slots (D35)
            [stored, computed)   request-owned

        Stores nothing while the live part is shorter than a window: such a prefix could not be locked.
        """
        computed = len(req.fill_ids)
        row = self.req_to_token_pool.read(req.req_pool_idx, computed)
        key = RadixKey([]) if self.disable else self._key(build_radix_key(req, computed))
        protected, cursor = self._owned_from(req)
        short = cursor > protected and len(key) - cursor < self.sliding_window_size
        if len(key) <= protected or short:
            req.prefix_indices = row
            return
        rank = self._rank(getattr(req, "dp_rank", None), "a request")
        matched, last, out = self._tree.insert(key, row[: len(key)], protected, cursor)
        self._apply(out, rank)
        self._log("insert", rank, len(key), matched, req)
        slots = np.concatenate([node.value for node in self._path(last)])
        self.req_to_token_pool.write((req.req_pool_idx, slice(protected, len(slots))), slots[protected:])
        receipt = self.inc_lock_ref(last)
        self._release(req)
        req.last_node = last
        self._take_receipt(req, receipt)
        req.cache_protected_len = req.last_matched_prefix_len = len(slots)
        req.prefix_indices = np.concatenate([slots, row[len(slots) :]])

    @staticmethod
    def _owned_from(req: Any) -> tuple[int, int]:
        """(protected length, reclaim cursor) of a request; 0 for a field it does not have."""
        protected = int(getattr(req, "cache_protected_len", 0) or 0)
        return protected, int(getattr(req, "swa_evicted_seqlen", 0) or 0)

    @staticmethod
    def _path(node: SWATreeNode) -> list[SWATreeNode]:
        path: list[SWATreeNode] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int | None = None) -> None:
        """Give back the request's SWA slots that no later query sees (RFC-0035 section 5); never a tree-owned one.

        ``pre_len`` is the processed length. The cursor ``swa_evicted_seqlen`` never moves backward.
        """
        rank = self._rank(dp_rank, "evict_req_swa")
        own = getattr(req, "dp_rank", None)
        if own is not None and own != rank:
            raise ValueError(
                f"evict_req_swa on dp_rank={rank} for a request of dp_rank={own}: pass dp_rank={own}"
            )
        node = getattr(req, "last_node", None)
        protected, cursor = self._owned_from(req)
        protected = max(protected, node.end if node is not None else 0)
        old, new = reclaim_boundary(cursor, protected, pre_len, self.sliding_window_size, self.page_size)
        if new > old:
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, old:new]
            self.token_to_kv_pool_allocator.free_swa(np.array(row, np.int32), dp_rank=rank)
            req.swa_evicted_seqlen = new
            self._log("reclaim", rank, pre_len, new - old, req)

    def _free(self, slots: IntArray, rank: int) -> None:
        if len(slots):
            self.token_to_kv_pool_allocator.free(slots, dp_rank=rank)

    def _release(self, req: Any) -> None:
        """Release the request's lock with the receipt it stored."""
        node = getattr(req, "last_node", None)
        if node is not None and node.parent is not None:
            self.dec_lock_ref(node, self._receipt(req))

    @staticmethod
    def _receipt(req: Any) -> DecLockRefParams:
        receipt: DecLockRefParams | None = getattr(req, "cache_lock_params", None)
        return receipt or DecLockRefParams(getattr(req, "swa_uuid_for_lock", None))

    @staticmethod
    def _take_receipt(req: Any, result: IncLockRefResult) -> None:
        req.cache_lock_params = result.to_dec_params()
        req.swa_uuid_for_lock = result.swa_uuid_for_lock

    @staticmethod
    def _clear_receipt(req: Any) -> None:
        req.cache_lock_params = None
        req.swa_uuid_for_lock = None

    # ------------------------------------------------------------------------------------------------ locks, eviction
    def inc_lock_ref(self, node: SWATreeNode) -> IncLockRefResult:
        """Protect the path (FULL) and the last window (SWA); the receipt carries the boundary's uuid."""
        if self.disable:
            return IncLockRefResult(delta=0)
        delta, uuid = self._tree.lock(node)
        self._log("lock", node.rank, node.end, -delta)
        return IncLockRefResult(delta=delta, swa_uuid_for_lock=uuid)

    def narrow_lock(self, req: Any) -> bool:
        """Exchange the request's lock for one that ends with its window; whether that gave anything back.

        Locks hold whole nodes, as long as a prompt. Under pressure the part above the window is cut off, so that a request
        that is alone on its rank can decode beside its own prompt.
        """
        node = req.last_node
        if self.disable or node is None or node is self._tree.root:
            return False
        if not self._tree.cut_window(node, self._receipt(req).swa_uuid_for_lock):
            return False
        receipt = self.inc_lock_ref(node)
        self._release(req)
        self._take_receipt(req, receipt)
        return True

    def dec_lock_ref(self, node: SWATreeNode, params: DecLockRefParams | None = None) -> int:
        """Release exactly what the receipt says; returns FULL tokens that became evictable. LockReceiptError otherwise."""
        if self.disable:
            return 0
        delta, out = self._tree.unlock(node, params.swa_uuid_for_lock if params is not None else None)
        self._apply(out, node.rank)
        self._log("unlock", node.rank, node.end, delta)
        return delta

    def evict(self, params: EvictParams) -> EvictResult:
        """Give back at least the wanted tokens per pool on one rank, or all that is evictable. Whole nodes."""
        if self.disable:
            return EvictResult()
        rank = self._rank(params.dp_rank, "evict")
        full, swa, out = self._tree.evict(rank, params.num_tokens, params.swa_num_tokens)
        self._apply(out, rank)
        self._log("evict", rank, max(params.num_tokens, params.swa_num_tokens), full + swa)
        return EvictResult(num_tokens_evicted=full, swa_num_tokens_evicted=swa)

    # -------------------------------------------------------------------------------------------------- observability
    def iter_ledger_nodes(self, dp_rank: int) -> Iterator[OwnedNode]:
        """Tree-owned slots of one rank; the SWA half is the mapped peer of the FULL half."""
        from sgl_jax.srt.mem_cache.ledger.exact import lookup
        from sgl_jax.srt.mem_cache.ledger.source import OwnedNode, rank_mapping

        mapping = rank_mapping(self.token_to_kv_pool_allocator, dp_rank)
        for node in self._tree.nodes():
            if node.rank == dp_rank:
                swa = None if node.swa_tombstone else lookup(mapping, node.value)
                yield OwnedNode(node.id, node.value, swa, node.full_lock_ref, node.swa_lock_ref)

    def cache_ledger_snapshot(self, dp_rank: int, live_reqs: Iterable[Any]) -> dict[str, int]:
        """Ownership ledger of one rank (RFC-0035 section 6); read-only."""
        from sgl_jax.srt.mem_cache.ledger.snapshot import build_snapshot

        return build_snapshot(self, dp_rank, live_reqs)

    def check(self) -> list[Violation]:
        """Structure, counters, candidates, locks, and the mapping of every node; [] when sound."""
        return check_tree(self._tree, self.token_to_kv_pool_allocator)

    def sanity_check(self) -> None:
        """Raise LedgerViolationError when the structure, the counters or the candidates are broken."""
        found = check_tree(self._tree, None)
        if found:
            raise LedgerViolationError(found, "SWARadixCache")

    def pretty_print(self) -> str:
        """Print and return the tree."""
        text = self.describe()
        print(text)
        return text

    def describe(self) -> str:
        """The tree as text, one node a line."""
        return print_tree(self._tree)

    def _log(self, op: str, rank: int, asked: int, got: int, req: Any = None) -> None:
        """Remember an operation for a crash bundle; ``asked`` and ``got`` are tokens."""
        self.op_log.append(OpRecord(op, rank, str(getattr(req, "rid", "")), asked, got))
