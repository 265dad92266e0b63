"""The hooks a component offers to the unified core, and what it may ask of the cache in return.

The core walks, splits, links and unlinks; a component knows what its own values mean. Slots are given back through the
cache's applier only, and values and locks change through its accounts only.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    EvictParams,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sgl_jax.srt.mem_cache.errors import Violation
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import (
    CacheTransferPhase,
    ComponentType,
    EvictLayer,
    LRURefreshPhase,
)
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams

IntArray = npt.NDArray[np.int32]
Tracker = dict[ComponentType, int]


class Accounts(Protocol):
    """Where values and locks change (``unified_radix_cache.accounts``)."""

    def set_value(self, node: UnifiedTreeNode, ct: ComponentType, value: Any) -> None: ...
    def change_lock(self, node: UnifiedTreeNode, ct: ComponentType, step: int) -> None: ...
    def refile(self, node: UnifiedTreeNode, ct: int) -> None: ...
    def lock_path(self, node: UnifiedTreeNode) -> int: ...
    def unlock_path(self, node: UnifiedTreeNode) -> int: ...
    def is_leaf(self, node: UnifiedTreeNode) -> bool: ...
    def oldest_leaf(self, rank: int) -> UnifiedTreeNode | None: ...
    def oldest(self, ct: ComponentType, rank: int) -> UnifiedTreeNode | None: ...


class Applier(Protocol):
    """Where slots change hands (``unified_radix_cache.applier``)."""

    def free_full(self, slots: IntArray, rank: int) -> None: ...
    def free_swa(self, full_slots: IntArray, rank: int) -> None: ...
    def move_mapping(self, source: IntArray, target: IntArray, rank: int) -> None: ...
    def translate(self, full_slots: IntArray, rank: int) -> IntArray: ...


class ComponentHost(Protocol):
    """What a component may ask of its cache."""

    accounts: Accounts
    applier: Applier
    page_size: int
    dp_size: int

    def cut_node(self, node: UnifiedTreeNode, cuts: Sequence[int]) -> list[UnifiedTreeNode]: ...
    def _evict_device_leaf(self, node: UnifiedTreeNode, tracker: Tracker) -> UnifiedTreeNode: ...
    def note_event(self, rank: int, name: str, count: int, tokens: int = 0) -> None: ...


def leaf_pieces(node: UnifiedTreeNode, start: int) -> list[tuple[UnifiedTreeNode, int, int]]:
    """Pieces ``(node, low, high)`` of a new leaf ``[start, ...)`` that ends with ``node``, top first, in positions of the key."""
    pieces = []
    high = node.path_len()
    while high > start:
        low = high - node.key.length
        pieces.append((node, low, high))
        node, high = node.parent, low
    return pieces[::-1]


class TreeComponent(abc.ABC):
    """One kind of state on the nodes of the unified tree.

    Constructed by the cache with validated ``params`` (RFC-0035 section 3). Default hooks do nothing, which is right for a
    component whose values follow the tokens one to one.
    """

    component_type: ClassVar[ComponentType]
    #: Whether :meth:`refresh_lru` wants to see every node of a walk.
    refreshes_on_walk: ClassVar[bool] = False

    def __init__(self, cache: Any, params: CacheInitParams | None = None) -> None:
        self.cache: ComponentHost = cache
        self.params = params

    # -- presence ----------------------------------------------------------------------------------------------------

    def node_has_component_data(self, node: UnifiedTreeNode, target: EvictLayer = EvictLayer.DEVICE) -> bool:
        """Whether ``node`` holds a value of this component on the asked tier."""
        data = node.component_data[self.component_type]
        on_device = bool(target & EvictLayer.DEVICE) and data.value is not None
        return on_device or (bool(target & EvictLayer.HOST) and data.host_value is not None)

    def value_len(self, node: UnifiedTreeNode) -> int:
        """Slots of this component that ``node`` holds on the device."""
        value = node.component_data[self.component_type].value
        return 0 if value is None else len(value)

    def rank_of(self, node: UnifiedTreeNode) -> int:
        """The node's DP rank. Raises ValueError when several ranks exist and the node's key names none."""
        rank = node.key.dp_rank
        if rank is not None:
            return rank
        if self.cache.dp_size > 1:
            raise ValueError(
                f"node {node.id} has no dp_rank, but there are {self.cache.dp_size} data-parallel ranks: slots are "
                f"rank-local, so every key must carry its dp_rank"
            )
        return 0

    def can_end_match(self, node: UnifiedTreeNode) -> bool:
        """False when no match can ever end at ``node`` as it is (rule 8)."""
        return True

    # -- match ---------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def create_match_validator(self, match_device_only: bool = False) -> Callable[[UnifiedTreeNode], bool]:
        """A predicate for one match: fed the path from the root down, says whether a match may end at each node."""

    def refresh_lru(self, phase: LRURefreshPhase, node: UnifiedTreeNode, root_node: UnifiedTreeNode) -> None:
        """Refresh this component's recency. ``node``: the visited node (walk-down) or the endpoint."""
        return None

    def finalize_match_result(
        self,
        result: MatchResult,
        params: MatchPrefixParams,
        value_chunks: Sequence[IntArray],
        best_value_len: int,
    ) -> MatchResult:
        """Last word on a match result. ``best_value_len``: how many of ``value_chunks`` were accepted."""
        return result

    # -- insert --------------------------------------------------------------------------------------------------------

    def update_component_on_insert_overlap(
        self,
        node: UnifiedTreeNode,
        prefix_len: int,
        total_prefix_len: int,
        value_slice: IntArray,
        params: InsertParams,
    ) -> int:
        """The inserted key covers ``node``. Returns the consumed boundary ``b`` in ``0..prefix_len``::

            value_slice[0:b]            not taken; the core frees what nobody takes
            value_slice[b:prefix_len]   owned by the tree from here on

        ``total_prefix_len`` is where the node starts in the key.
        """
        return prefix_len

    def should_skip_leaf_creation(self, total_prefix_len: int, key_len: int, params: InsertParams) -> bool:
        """True when a leaf over ``[total_prefix_len, key_len)`` could never end a match."""
        return False

    def leaf_cuts(self, start: int, end: int, params: InsertParams) -> list[int]:
        """Positions inside ``(start, end)`` at which a new leaf ``[start, end)`` has to be cut."""
        return []

    def recover_after_unevict(
        self, node: UnifiedTreeNode, prefix_len: int, total_prefix_len: int, params: InsertParams
    ) -> None:
        """Fresh slots are about to become the FULL value of ``node``: take this component's part. Once, before commit."""
        return None

    def on_parent_gains_child(self, node: UnifiedTreeNode) -> None:
        """``node`` is about to get a new child."""
        return None

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: InsertParams, result: InsertResult
    ) -> None:
        """The insert ended at ``node``. ``result.prefix_len`` is where a new leaf starts in ``params.value``; where it was cut,
        ``node`` is its last piece (see :func:`leaf_pieces`).
        """
        return None

    def redistribute_on_node_split(self, new_parent: UnifiedTreeNode, child: UnifiedTreeNode) -> None:
        """Share the child's value between the halves; keys are set already. Locks and age are the same on both.

        Values become views; whoever cuts copies them when all cuts are done (D81).
        """
        ct = self.component_type
        upper, lower = new_parent.component_data[ct], child.component_data[ct]
        cut = new_parent.key.length
        if lower.value is not None:
            upper.value = lower.value[:cut]
            lower.value = lower.value[cut:]
        upper.lock_ref = lower.lock_ref
        upper.age = lower.age

    # -- eviction --------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def evict_component(
        self, node: UnifiedTreeNode, target: EvictLayer = EvictLayer.DEVICE
    ) -> tuple[int, int]:
        """Give back this component's slots of ``node``. Returns ``(device slots, host slots)`` freed."""

    @abc.abstractmethod
    def eviction_priority(self, is_leaf: bool) -> int:
        """Leaves 0; internal nodes: the higher, the longer it stays."""

    @abc.abstractmethod
    def drive_eviction(self, params: EvictParams, tracker: Tracker) -> None:
        """Evict on ``params.dp_rank`` until ``tracker`` shows what ``params`` asks of this component, or nothing is left."""

    # -- locks -----------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def acquire_component_lock(
        self, node: UnifiedTreeNode, result: IncLockRefResult, lock_host: bool = False
    ) -> IncLockRefResult:
        """Protect what a reader of the path to ``node`` needs; fills its part of ``result``."""

    @abc.abstractmethod
    def release_component_lock(
        self, node: UnifiedTreeNode, params: DecLockRefParams | None, lock_host: bool = False
    ) -> None:
        """Release exactly what the matching acquire took. Raises LockReceiptError when ``params`` is not its receipt."""

    def cut_lock(self, node: UnifiedTreeNode, params: DecLockRefParams) -> bool:
        """Under pressure: split nodes so that a new lock of ``node`` holds less than this receipt; whether it would.

        Outstanding locks keep what they hold.
        """
        return False

    # -- requests --------------------------------------------------------------------------------------------------------

    def prepare_for_caching_req(
        self, req: Any, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """Add what the insert needs to know about the request. Returns a cap on the cached length, or None."""
        return None

    def cleanup_after_caching_req(
        self,
        req: Any,
        is_finished: bool,
        insert_result: InsertResult | None = None,
        insert_params: InsertParams | None = None,
    ) -> None:
        """The request was cached, or released without insert (``insert_result`` None)."""
        return None

    # -- host tier -------------------------------------------------------------------------------------------------------

    def build_hicache_transfers(self, node: UnifiedTreeNode, phase: CacheTransferPhase) -> list[Any]:
        """Transfers this component needs for ``phase``; none without a host tier."""
        return []

    def commit_hicache_transfer(
        self, node: UnifiedTreeNode, phase: CacheTransferPhase, transfers: Any = ()
    ) -> None:
        """A transfer of ``phase`` completed."""
        return None

    def drive_host_eviction(self, params: EvictParams, tracker: Tracker) -> None:
        """Evict on the host tier; nothing to do without one."""
        return None

    # -- invariants ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The tree was emptied."""
        return None

    def check_nodes(self, nodes: Sequence[UnifiedTreeNode]) -> list[Violation]:
        """Broken invariants that only this component can see."""
        return []


def overriders(components: Iterable[TreeComponent], hook: str) -> tuple[TreeComponent, ...]:
    """The components with a ``hook`` of their own. The default ones do nothing, so the core asks these only."""
    default = getattr(TreeComponent, hook)
    return tuple(c for c in components if getattr(type(c), hook) is not default)
