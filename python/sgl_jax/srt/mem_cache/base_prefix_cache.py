"""The contract every prefix cache keeps: parameters, results, receipts and the abstract base (CONTRACT: the seam).

Index arrays in results are 1-D int32. Sizes are tokens of one DP rank. ``match_prefix`` may split nodes but never moves
ownership; ``insert``, ``evict``, the two ``cache_*_req`` calls and ``reset`` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.request_view import RequestView

IntArray = npt.NDArray[np.int32]
Span = tuple[int, int]


@dataclass(slots=True)
class MatchPrefixParams:
    """``full_only``: only the FULL validator gates (used by the rematch after an unfinished insert)."""

    key: RadixKey
    cow_recurrent: bool = False
    req: Any = None
    full_only: bool = False


@dataclass(slots=True)
class InsertParams:
    """``prev_prefix_len``: leading tokens of ``value`` the tree already owns; ``swa_evicted_seqlen``: reclaim cursor (D17)."""

    key: RadixKey | None = None
    value: IntArray | None = None
    prev_prefix_len: int = 0
    swa_evicted_seqlen: int = 0
    recurrent_value: IntArray | None = None


@dataclass(slots=True)
class InsertResult:
    """``prefix_len``: tokens of the key that were already in the tree."""

    prefix_len: int = 0
    recurrent_exist: bool = False
    recurrent_committed: bool = False


@dataclass(slots=True)
class EvictParams:
    """Tokens wanted back per pool on one rank."""

    num_tokens: int = 0
    swa_num_tokens: int = 0
    dp_rank: int | None = None
    recurrent_num: int = 0


@dataclass(slots=True)
class EvictResult:
    """Tokens actually given back per pool (whole nodes, so it may exceed the request)."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    recurrent_num_evicted: int = 0


@dataclass(slots=True)
class DecLockRefParams:
    """The receipt ``dec_lock_ref`` takes: exactly what ``inc_lock_ref`` acquired.

    ``swa_spans`` are half-open distance intervals, in tokens, measured upward from the end of the locked node: they stay true
    when a node of the path is split, tombstoned or healed (rule 3). None means a hand-built receipt: the release then walks by
    ``skip_lock_node_ids`` and ``swa_uuid_for_lock``.
    """

    swa_uuid_for_lock: int | None = None
    skip_lock_node_ids: dict[Any, Any] = field(default_factory=dict)
    swa_spans: tuple[Span, ...] | None = None


@dataclass(slots=True)
class IncLockRefResult:
    """What a lock acquired. ``delta`` is the (negative) change of evictable FULL tokens."""

    delta: int | None = None
    swa_uuid_for_lock: int | None = None
    skip_lock_node_ids: dict[Any, Any] = field(default_factory=dict)
    swa_spans: tuple[Span, ...] | None = None

    def to_dec_params(self) -> DecLockRefParams:
        """The receipt to store on the request and to hand to ``dec_lock_ref`` once."""
        return DecLockRefParams(self.swa_uuid_for_lock, self.skip_lock_node_ids, self.swa_spans)


class MatchResult(NamedTuple):
    """``device_indices``: FULL slots of the accepted prefix, int32 [accepted length]; ``last_device_node`` ends it.

    ``full_hit_length``: tokens that FULL alone holds of the key; what exceeds the accepted prefix was cut off by a missing window.
    """

    device_indices: IntArray
    last_device_node: Any
    last_host_node: Any
    best_match_node: Any = None
    host_hit_length: int = 0
    recurrent_branching_seqlen: int | None = None
    full_hit_length: int = 0


@dataclass(frozen=True, slots=True)
class ReclaimSchedule:
    """When ``evict_req_swa`` is called: policy data of a cache class, so that the scheduler needs no class check.

    ``decode_offset`` / ``decode_offset_overlap``: the first decode step (``decode_batch_idx``) that reclaims; then every
    ``reclaim_interval`` steps. ``on_extend``: whether a chunk's own tail is reclaimed after an extend (between chunks).
    """

    decode_offset: int = 0
    decode_offset_overlap: int = 1
    on_extend: bool = True


class BasePrefixCache(ABC):
    """Base of all caches. Capabilities are asked for (``supports_swa``), classes never."""

    #: When the batch asks this cache to reclaim a request's SWA tail; None: this cache owns no reclaim.
    reclaim_schedule: ClassVar[ReclaimSchedule | None] = None

    @abstractmethod
    def reset(self) -> None:
        """Forget everything without freeing slots; the allocator is cleared by the caller."""

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest valid prefix. Page-aligns the key first; may split a node, never moves ownership."""

    @abstractmethod
    def cache_finished_req(self, req: RequestView, is_insert: bool = True, **kwargs: Any) -> None:
        """Take over (or free) everything the request owns and release its lock."""

    @abstractmethod
    def cache_unfinished_req(self, req: RequestView, **kwargs: Any) -> None:
        """Insert the computed part, re-point the row and exchange the lock receipt."""

    @abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Give back at least the wanted tokens per pool, or all that is evictable."""

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Protect the path of ``node``; the result's receipt must reach ``dec_lock_ref`` exactly once."""

    @abstractmethod
    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> int | None:
        """Release what the receipt says."""

    def narrow_lock(self, req: RequestView) -> bool:
        """Under pressure: make the request's lock hold no more SWA than its window, page rounded; whether it held more.

        Locks hold whole nodes. A request alone on its rank must be able to decode beside its own prompt.
        """
        return False

    def supports_swa(self) -> bool:
        return False

    def supports_recurrent(self) -> bool:
        return False

    def recurrent_extra_buffer_active(self) -> bool:
        return False

    def evictable_size(self, dp_rank: int = 0) -> int:
        return 0

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        return 0

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        return 0

    def protected_size(self, dp_rank: int = 0) -> int:
        return 0

    def full_protected_size(self, dp_rank: int = 0) -> int:
        return 0

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        return 0

    def total_size(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not report a total size")

    def describe(self) -> str:
        """The tree as text, one node a line, for crash bundles and people; read-only."""
        return f"{type(self).__name__} keeps no tree"

    def pretty_print(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no tree to print")

    def init_load_back(self, last_host_node: Any, host_hit_length: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no host tier")

    def ready_to_load_host_cache(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no host tier")

    def check_hicache_events(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no host tier")

    def take_events(self) -> list[Any]:
        return []

    def cache_ledger_snapshot(self, dp_rank: int, live_reqs: Iterable[RequestView]) -> dict[str, int]:
        """Ownership ledger of one rank (RFC-0035 section 6). SWA-capable caches implement it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no SWA ownership ledger")
