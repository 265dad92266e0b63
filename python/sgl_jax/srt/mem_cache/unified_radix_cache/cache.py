"""``UnifiedRadixCache``: one FULL-backed tree with auxiliary components, behind the cache contract (RFC-0035).

The facade wires four parts: the tree (mechanism), the accounts (sums, candidates), the components (what values mean) and
the applier (slots change hands). Request transactions live in :mod:`lifecycle`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    ReclaimSchedule,
)
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.errors import LockReceiptError, TreeInvariantError, Violation
from sgl_jax.srt.mem_cache.page import floor_page
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.radix_tree.request_key import to_bigram_key
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType, LRURefreshPhase
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.receipts import reclaim_rank
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import (
    Tracker,
    TreeComponent,
    overriders,
)
from sgl_jax.srt.mem_cache.unified_radix_cache.accounts import CandidateView, NodeAccounts
from sgl_jax.srt.mem_cache.unified_radix_cache.applier import SlotApplier
from sgl_jax.srt.mem_cache.unified_radix_cache.checks import check_cache
from sgl_jax.srt.mem_cache.unified_radix_cache.construction import (
    COMPONENT_REGISTRY,
    component_order,
    int_attribute,
    resolve_init_params,
)
from sgl_jax.srt.mem_cache.unified_radix_cache.insertion import Inserter, InsertFacts
from sgl_jax.srt.mem_cache.unified_radix_cache.lifecycle import RequestLifecycle
from sgl_jax.srt.mem_cache.unified_radix_cache.matching import accept_path
from sgl_jax.srt.mem_cache.unified_radix_cache.observe import OpRecord, describe_tree, ledger_nodes
from sgl_jax.srt.mem_cache.unified_radix_cache.tree import PrefixTree

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.ledger.source import OwnedNode

IntArray = npt.NDArray[np.int32]
FULL, SWA, RECURRENT = ComponentType.FULL, ComponentType.SWA, ComponentType.RECURRENT
_OP_LOG_LENGTH = 1000


class UnifiedRadixCache(BasePrefixCache):
    """Prefix cache over one tree. ``tree_components`` names what nodes carry: (FULL,) or (FULL, SWA).

    ``match_prefix`` may split nodes, never moves slots. ``insert`` takes over ``value[prev_prefix_len:]``; with more than one
    component it also frees the duplicates, with one the caller does. All sizes are tokens of one rank.
    """

    reclaim_schedule: ClassVar[ReclaimSchedule | None] = ReclaimSchedule()
    tree_components: tuple[ComponentType, ...] = ()
    hicache_enabled = False
    has_swa = False

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
        tree_components: Sequence[ComponentType] = (FULL,),
        enable_recurrent_extra_buffer: bool = False,
        recurrent_track_interval: int | None = None,
        component_init_params: CacheInitParams | None = None,
    ) -> None:
        """The seam's signature. ``kv_head_num`` … ``dtype`` describe the device layout, which this cache never looks at.

        Raises ValueError when ``component_init_params`` disagrees with the other arguments, when SWA comes without a positive
        ``sliding_window_size``, and for a component this version does not have.
        """
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = page_size
        self.disable = disable
        self.is_eagle = is_eagle
        self.dp_size = int_attribute(token_to_kv_pool_allocator, "dp_size", 1)
        self.tree_components = component_order(tree_components)
        self.component_init_params = resolve_init_params(
            component_init_params,
            CacheInitParams(
                req_to_token_pool,
                token_to_kv_pool_allocator,
                page_size,
                is_eagle,
                None,
                enable_recurrent_extra_buffer,
                recurrent_track_interval,
            ),
            self.tree_components,
        )
        self.has_swa = SWA in self.tree_components
        self.applier = SlotApplier(token_to_kv_pool_allocator, dual=self.has_swa)
        self.components: dict[ComponentType, TreeComponent] = {
            ct: COMPONENT_REGISTRY[ct](self, self.component_init_params) for ct in self.tree_components
        }
        self._components_tuple = tuple(self.components.values())
        self._enders = tuple(c for c in self._components_tuple if c.component_type is not FULL)
        self._walkers = tuple(c for c in self._components_tuple if c.refreshes_on_walk)
        self._finalizers = overriders(self._components_tuple, "finalize_match_result")
        self._lifecycle = RequestLifecycle(self)
        self.op_log: deque[OpRecord] = deque(maxlen=_OP_LOG_LENGTH)
        self._ledger_event_totals: defaultdict[int, defaultdict[str, int]] = defaultdict(
            partial(defaultdict, int)
        )
        self._event_token_totals: defaultdict[int, defaultdict[str, int]] = defaultdict(
            partial(defaultdict, int)
        )
        self.reset()

    # -- structure -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget tree, locks and sums without freeing slots. Event totals are cumulative and stay."""
        self.accounts = NodeAccounts(self.tree_components, self._can_end_match)
        self.tree = PrefixTree(self.page_size, self._components_tuple, self.accounts)
        self._inserter = Inserter(self.tree, self._components_tuple)
        self.root_node = root = self.tree.root
        self._no_match = MatchResult(np.empty((0,), np.int32), root, root, root)
        self.get_child_key_fn = self.tree.child_key
        for component in self._components_tuple:
            component.reset()

    def _can_end_match(self, node: UnifiedTreeNode) -> bool:
        for component in self._enders:  # noqa: SIM110  (asked for every node: no generator)
            if not component.can_end_match(node):
                return False
        return True

    def cut_node(self, node: UnifiedTreeNode, cuts: Sequence[int]) -> list[UnifiedTreeNode]:
        """See :meth:`PrefixTree.cut_node`."""
        return self.tree.cut_node(node, cuts)

    def _split_node(self, key: RadixKey, child: UnifiedTreeNode, split_len: int) -> UnifiedTreeNode:
        """Cut ``child`` at ``split_len``; returns the new parent, ``child`` stays the lower half."""
        return self.tree.cut_node(child, (split_len,))[0]

    def iter_nodes(self, dp_rank: int | None = None) -> Iterator[UnifiedTreeNode]:
        """Every node but the root, parents first."""
        return self.tree.nodes(dp_rank)

    def _namespaced(self, key: RadixKey) -> RadixKey:
        """Page-aligned key (D10). Raises ValueError when an SWA tree over several ranks gets a key of none of them."""
        if self.has_swa and self.dp_size > 1:
            self._check_rank("RadixKey(..., dp_rank)", key.dp_rank)
        if self.is_eagle:
            key = to_bigram_key(key)
        aligned = floor_page(key.length, self.page_size)
        return key if aligned == key.length else key[:aligned]

    # -- match and insert ------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest prefix that is contiguous in FULL and accepted by every component (FULL alone with ``full_only``)."""
        if self.disable:
            return self._no_match
        key = self._namespaced(params.key)
        path = self.tree.walk(key)
        if not path:
            self._log("match", key.dp_rank, params.req, key.length, 0)
            return self._no_match
        others = () if params.full_only else self._enders
        chunks, accepted = accept_path(path, self.components[FULL], others)
        for component in self._walkers:
            for node in path:
                component.refresh_lru(LRURefreshPhase.WALKDOWN, node, self.root_node)
        best = path[accepted - 1] if accepted else self.root_node
        if accepted and not params.full_only:
            for component in self._components_tuple:
                component.refresh_lru(LRURefreshPhase.MATCH_END, best, self.root_node)
        slots = np.concatenate(chunks[:accepted]) if accepted else self._no_match.device_indices
        full_hit = len(slots) + sum(map(len, chunks[accepted:]))
        result = MatchResult(slots, best, best, best, full_hit_length=full_hit)
        for component in self._finalizers:
            result = component.finalize_match_result(result, params, chunks, accepted)
        self._log("match", key.dp_rank, params.req, key.length, len(result.device_indices))
        return result

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert ``value`` (token ids when None) under ``key``, both cut to whole pages. See the class for ownership."""
        if self.disable or params.key is None:
            return InsertResult()
        key = self._namespaced(params.key)
        value = np.asarray(params.key.token_ids if params.value is None else params.value, np.int32)
        if len(value) < len(key):
            raise ValueError(
                f"insert of {len(key)} tokens with {len(value)} slots: one slot per token is needed"
            )
        if not len(key):
            return InsertResult()
        filled = InsertParams(
            key, value, params.prev_prefix_len, params.swa_evicted_seqlen, params.recurrent_value
        )
        return self.insert_below(self.root_node, filled, keep_leaf=False).result

    def insert_below(
        self, start: UnifiedTreeNode, params: InsertParams, *, keep_leaf: bool, rid: str = ""
    ) -> InsertFacts:
        """Insert below a node whose path spells the key's beginning; frees what nobody took. Key and value page aligned."""
        key = params.key
        assert key is not None
        facts = self._inserter.run(key, params, start, keep_leaf)
        rank = key.dp_rank or 0
        for slots in facts.surrendered:
            self.applier.free(slots, rank)
        self.op_log.append(OpRecord("insert", rank, rid, key.length, facts.result.prefix_len))
        return facts

    # -- eviction --------------------------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Give back at least the wanted tokens of each pool of one rank, or all that is evictable (D27).

        Whole nodes, oldest first, at a cost of the nodes freed. Leaves nothing can match go first (rule 8).
        """
        wanted = max(params.num_tokens, params.swa_num_tokens, params.recurrent_num)
        if self.disable or wanted <= 0:
            return EvictResult()
        tracker: Tracker = {FULL: 0, SWA: 0, RECURRENT: 0}
        rank = self._rank_or_raise(params.dp_rank)
        self.applier.gather()
        try:
            for node in self.accounts.barren_nodes(rank):
                self._evict_device_leaf(node, tracker)
            for component in self._components_tuple:
                component.drive_eviction(params, tracker)
        finally:
            self.applier.release_gathered(rank)
        self.op_log.append(OpRecord("evict", rank, "", wanted, tracker[FULL] + tracker[SWA]))
        return EvictResult(tracker[FULL], tracker[SWA], tracker[RECURRENT])

    def _rank_or_raise(self, dp_rank: int | None) -> int:
        if self.has_swa and self.dp_size > 1:
            self._check_rank("EvictParams(dp_rank)", dp_rank)
        return dp_rank or 0

    def _check_rank(self, what: str, dp_rank: int | None) -> None:
        if dp_rank is None or not 0 <= dp_rank < self.dp_size:
            raise ValueError(
                f"{what} is {dp_rank} on {self.dp_size} data-parallel ranks: slots are rank-local, pass "
                f"dp_rank=0..{self.dp_size - 1}"
            )

    def _evict_device_leaf(self, node: UnifiedTreeNode, tracker: Tracker) -> UnifiedTreeNode:
        """Remove a leaf: FULL slots, then SWA slots, then the node with its FULL value; and what became barren above it.

        ``tracker`` counts freed slots per component. The cascade stops at a node that is locked, has children or can end a
        match (D28); returns that node.
        """
        at = node
        while True:
            for component in self._components_tuple:
                freed = component.evict_component(at)[0]
                ct = component.component_type
                tracker[ct] = tracker.get(ct, 0) + freed
            at = self.tree.detach_leaf(at)
            if not self.accounts.is_barren(at):
                return at

    def _update_aux_evictable_node_sets(self, node: UnifiedTreeNode) -> None:
        """Re-file ``node`` among the candidates after its data were changed by hand."""
        self.accounts.sync(node)

    # -- locks -----------------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: UnifiedTreeNode) -> IncLockRefResult:
        """Protect the path (FULL) and the last window (SWA) of ``node``. ``delta``: minus the newly protected FULL tokens."""
        result = IncLockRefResult(delta=0)
        if self.disable:
            return result
        if node is self.root_node:
            if self.has_swa:
                result.skip_lock_node_ids[SWA], result.swa_spans = [], ()
            return result
        if node.parent is None or not self.tree.owns(node):
            raise TreeInvariantError(
                f"node {node.id} is not in the tree (evicted or reset): match again before locking"
            )
        for component in self._components_tuple:
            component.acquire_component_lock(node, result)
        self.op_log.append(OpRecord("lock", node.rank, "", node.path_len(), -(result.delta or 0)))
        return result

    def dec_lock_ref(self, node: UnifiedTreeNode, params: DecLockRefParams | None = None) -> int:
        """Release one lock with its receipt; always returns 0. At the last unlock a leaf nothing can match goes (rule 8).

        Raises LockReceiptError when ``params`` is not a receipt of an outstanding lock of ``node``.
        """
        if self.disable or node is self.root_node:
            return 0
        if node.parent is None or not self.tree.owns(node):
            raise LockReceiptError(f"node {node.id} is not in the tree any more, so it cannot hold a lock")
        self.accounts.require_path_lock(node)
        for component in reversed(self._components_tuple):  # a wrong receipt changes nothing
            component.release_component_lock(node, params)
        self.op_log.append(OpRecord("unlock", node.rank, "", node.path_len(), 0))
        if self.accounts.is_barren(node):
            self._evict_device_leaf(node, dict.fromkeys(ComponentType, 0))
        return 0

    def narrow_lock(self, req: Any) -> bool:
        """See :meth:`BasePrefixCache.narrow_lock` and :meth:`RequestLifecycle.narrow`."""
        return not self.disable and self._lifecycle.narrow(req)

    # -- requests --------------------------------------------------------------------------------------------------

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        """Take over or free everything the request owns and release its lock. See :meth:`RequestLifecycle.finished`."""
        self._lifecycle.finished(req, is_insert)

    def cache_unfinished_req(self, req: Any, **kwargs: Any) -> None:
        """Insert the computed part, re-point the row, exchange the receipt. See :meth:`RequestLifecycle.unfinished`."""
        self._lifecycle.unfinished(req)

    def evict_req_swa(self, req: Any, pre_len: int, dp_rank: int | None = None) -> None:
        """Free the request's own out-of-window SWA slots (RFC-0035 section 5); no-op without SWA.

        Raises ValueError when ``dp_rank`` is omitted with several ranks or is not the request's.
        """
        if not self.has_swa or self.sliding_window_size is None:
            return
        rank = reclaim_rank(req, dp_rank, self.dp_size)
        self._lifecycle.reclaim(req, pre_len, rank, self.sliding_window_size)

    # -- capabilities and sizes ------------------------------------------------------------------------------------

    def supports_swa(self) -> bool:
        return SWA in self.tree_components

    def supports_recurrent(self) -> bool:
        return RECURRENT in self.tree_components

    @property
    def sliding_window_size(self) -> int | None:
        """Window of the SWA component; None without one."""
        return self.component_init_params.sliding_window_size if self.has_swa else None

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        return self.accounts.evictable[FULL][dp_rank]

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        return self.accounts.evictable[SWA][dp_rank]

    def full_protected_size(self, dp_rank: int = 0) -> int:
        return self.accounts.protected[FULL][dp_rank]

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        return self.accounts.protected[SWA][dp_rank]

    evictable_size = full_evictable_size
    protected_size = full_protected_size

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        return self.accounts.evictable[RECURRENT][dp_rank]

    def total_size(self) -> int:
        """FULL tokens in the tree, all ranks."""
        return sum(len(n.full_data.value) for n in self.tree.nodes() if n.full_data.value is not None)

    def full_lru_list_evictable_size(self) -> int:
        """Evictable FULL tokens of all ranks, counted over the nodes."""
        return sum(len(n.full_data.value) for n in self.tree.nodes() if not n.full_data.locked)

    def swa_lru_list_evictable_size(self) -> int:
        """Evictable SWA tokens of all ranks, counted over the candidates."""
        if not self.has_swa:
            return 0
        return sum(len(n.component_data[SWA].value) for n in CandidateView(lambda: self.accounts.aux[SWA]))

    # -- observation -----------------------------------------------------------------------------------------------

    @property
    def component_evictable_size_(self) -> dict[ComponentType, Any]:
        return self.accounts.evictable

    @property
    def component_protected_size_(self) -> dict[ComponentType, Any]:
        return self.accounts.protected

    @property
    def evictable_device_leaves(self) -> set[UnifiedTreeNode]:
        """Leaves FULL may evict, all ranks."""
        return set(CandidateView(lambda: self.accounts.leaves))

    @property
    def aux_evictable_device_nodes(self) -> dict[ComponentType, CandidateView]:
        """Per auxiliary component: its unlocked nodes with a value."""
        accounts = self.accounts
        return {ct: CandidateView(partial(accounts.aux_of, ct)) for ct in accounts.aux}

    def note_event(self, rank: int, name: str, count: int, tokens: int = 0) -> None:
        """Add to a cumulative total of the ledger (created on the first event); ``tokens``: how many an event was about."""
        self._ledger_event_totals[rank][name] += count
        if tokens:
            self._event_token_totals[rank][name] += tokens

    def _log(self, op: str, rank: int | None, req: Any, asked: int, got: int) -> None:
        self.op_log.append(OpRecord(op, rank or 0, str(getattr(req, "rid", "")), asked, got))

    def iter_ledger_nodes(self, dp_rank: int) -> Iterator[OwnedNode]:
        """The nodes of one rank as the ledger reads them."""
        return ledger_nodes(self.tree.nodes(dp_rank))

    def cache_ledger_snapshot(self, dp_rank: int, live_reqs: Iterable[Any]) -> dict[str, int]:
        """The ownership ledger of one rank (RFC-0035 section 6); read-only."""
        from sgl_jax.srt.mem_cache.ledger.snapshot import build_snapshot

        return build_snapshot(self, dp_rank, live_reqs)

    def check(self) -> list[Violation]:
        """Every broken invariant of tree, sums, candidates, locks and mapping; empty when sound. O(tree)."""
        return check_cache(self)

    def pretty_print(self) -> str:
        """Print the tree and return the text: tokens, S for live SWA or T for a tombstone, locks."""
        text = self.describe()
        print(text)
        return text

    def describe(self) -> str:
        """One line per node, indented by depth."""
        return describe_tree(self.root_node, self.has_swa)
