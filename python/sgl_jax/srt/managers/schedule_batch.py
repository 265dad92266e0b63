"""sglang-jax's batch object under its own names (CONTRACT 11), over the same allocation, release and window functions.

The scheduler here builds its steps from seats (``prefill.py``, ``decode.py``, ``batch_builder.py``); code and tests written for
sglang-jax drive a batch by hand, and this module is what they import. Every decision is shared: ``mem_cache.common`` allocates and
releases, ``mem_cache.window`` says what is reclaimed, and the cache's ``reclaim_schedule`` says when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.finish import abort_reason
from sgl_jax.srt.managers.io_struct import FinishReason
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.mem_cache.base_prefix_cache import ReclaimSchedule
from sgl_jax.srt.mem_cache.common import (
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    available_and_evictable_str,
    evict_from_tree_cache,
    release_kv_cache,
)
from sgl_jax.srt.mem_cache.page import new_pages
from sgl_jax.srt.mem_cache.window import peak_live_tokens, reclaim_boundary, reclaim_interval
from sgl_jax.srt.model_executor.forward_inputs import ForwardMode

__all__ = [
    "FINISH_ABORT",
    "Req",
    "ScheduleBatch",
    "ScheduleReqsInfo",
    "get_last_loc",
    "global_server_args_dict",
    "swa_eviction_interval",
    "swa_eviction_peak_tokens",
]

Int32 = npt.NDArray[np.int32]

#: Server arguments a batch reads; patched by tests.
global_server_args_dict: dict[str, Any] = {"chunked_prefill_size": None}

#: A cache without a schedule of its own: reclaim in decode only, one step after an interval began.
_PLAIN_SCHEDULE = ReclaimSchedule(decode_offset=1, decode_offset_overlap=1, on_extend=False)
#: A cache that remembers nothing (it has no tree): every interval from the first step on, and between chunks.
_CHUNK_SCHEDULE = ReclaimSchedule(decode_offset=0, decode_offset_overlap=0, on_extend=True)
_EXTENDS_IN_FLIGHT = 2


def FINISH_ABORT(
    message: str = "Unknown error", status_code: int | None = None, err_type: str = ""
) -> FinishReason:
    """An abort reason under the seam's name."""
    return abort_reason(f"{err_type}: {message}" if err_type else message, status_code or 0)


def swa_eviction_interval(window: int, page_size: int, multiplier: float = 1.0) -> int:
    """Decode steps between two reclaims: a page multiple (D80)."""
    return reclaim_interval(window, page_size, multiplier)


def swa_eviction_peak_tokens(window: int, page_size: int, multiplier: float = 1.0) -> int:
    """Most window slots a decoding request holds between two reclaims (D79)."""
    return peak_live_tokens(window, page_size, multiplier)


def get_last_loc(req_to_token: Int32, rows: Int32, prefix_lens: Int32) -> Int32:
    """Slot of the last prefix token per row; -1 for an empty prefix."""
    prefix = np.asarray(prefix_lens)
    last = req_to_token[np.asarray(rows), np.maximum(prefix - 1, 0)]
    return np.where(prefix > 0, last, -1).astype(np.int32)


@dataclass
class ScheduleReqsInfo:
    """One rank's share of a batch. Arrays are [number of requests]."""

    reqs: list[Req] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)
    seq_lens: Int32 | None = None
    out_cache_loc: Int32 | None = None
    chunked_req: Req | None = None


@dataclass
class ScheduleBatch:
    """Requests of all ranks with their pools. With one rank, attributes of its :class:`ScheduleReqsInfo` read through."""

    reqs_info: list[ScheduleReqsInfo]
    req_to_token_pool: Any = None
    token_to_kv_pool_allocator: Any = None
    tree_cache: Any = None
    model_config: Any = None
    enable_overlap: bool = False
    dp_size: int = 1
    is_hybrid: bool = False
    forward_mode: ForwardMode | None = None

    @classmethod
    def init_new(
        cls,
        reqs: Sequence[Req] | Sequence[Sequence[Req]],
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        tree_cache: Any,
        model_config: Any,
        enable_overlap: bool,
        dp_size: int = 1,
        spec_algorithm: Any = None,
        enable_custom_logit_processor: bool = False,
        chunked_reqs: Sequence[Req | None] | None = None,
        mesh: Any = None,
    ) -> ScheduleBatch:
        """Hybrid exactly when the allocator joins two pools; then the cache must own reclaim. Raises ValueError otherwise."""
        del spec_algorithm, enable_custom_logit_processor, mesh
        hybrid = hasattr(type(token_to_kv_pool_allocator), "swa_available_size")
        if hybrid and tree_cache is not None and not tree_cache.supports_swa():
            raise ValueError(
                f"{type(tree_cache).__name__} cannot serve a hybrid model: it has no SWA support"
            )
        lists: list[list[Req]] = [list(part) for part in reqs] if dp_size > 1 else [list(reqs)]  # type: ignore[arg-type]
        chunked = chunked_reqs or [None] * dp_size
        infos = [
            ScheduleReqsInfo(reqs=part, chunked_req=one) for part, one in zip(lists, chunked, strict=True)
        ]
        return cls(
            infos,
            req_to_token_pool,
            token_to_kv_pool_allocator,
            tree_cache,
            model_config,
            enable_overlap,
            dp_size,
            hybrid,
        )

    def __getattr__(self, name: str) -> Any:
        infos = self.__dict__.get("reqs_info")
        if infos is not None and len(infos) == 1 and name in ScheduleReqsInfo.__dataclass_fields__:
            return getattr(infos[0], name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # ------------------------------------------------------------------------------------------------------------- prepare
    def alloc_req_slots(self, reqs: list[Req]) -> list[int]:
        """Rows for the requests. Raises RuntimeError when there are too few."""
        rows: list[int] | None = self.req_to_token_pool.alloc(reqs)
        if rows is None:
            free = self.req_to_token_pool.available_size()
            raise RuntimeError(
                f"out of request rows: {len(reqs)} wanted, {free} free (--max-running-requests)"
            )
        return rows

    def prepare_for_extend(self) -> None:
        """Rows and slots for ``[len(prefix_indices), len(fill_ids))`` of every request::

        [0, prefix)       the matched slots, written to the row
        [prefix, seq)     new slots, request-owned
        """
        self.forward_mode = ForwardMode.EXTEND
        for rank, info in enumerate(self.reqs_info):
            if info.reqs:
                self._extend_rank(rank, info)
        self.maybe_evict_swa()

    def _extend_rank(self, rank: int, info: ScheduleReqsInfo) -> None:
        info.prefix_lens = [len(req.prefix_indices) for req in info.reqs]
        ends = [len(req.fill_ids) for req in info.reqs]
        info.extend_lens = [end - start for start, end in zip(info.prefix_lens, ends, strict=True)]
        info.seq_lens = np.array(ends, np.int32)
        self.alloc_req_slots(info.reqs)
        last = [int(req.prefix_indices[-1]) if len(req.prefix_indices) else -1 for req in info.reqs]
        count = sum(info.extend_lens)
        slots: Any
        if self.token_to_kv_pool_allocator.page_size == 1:
            slots = alloc_token_slots(self.tree_cache, count, dp_rank=rank)
        else:
            slots = alloc_paged_token_slots_extend(
                self.tree_cache, info.prefix_lens, ends, last, count, dp_rank=rank
            )
        info.out_cache_loc = slots
        offset = 0
        for req, start, end in zip(info.reqs, info.prefix_lens, ends, strict=True):
            self.req_to_token_pool.write((req.req_pool_idx, slice(0, start)), req.prefix_indices)
            self.req_to_token_pool.write(
                (req.req_pool_idx, slice(start, end)), slots[offset : offset + end - start]
            )
            offset += end - start
            req.kv_committed_len = req.kv_allocated_len = end
            req.cache_protected_len = req.last_matched_prefix_len
            req.extend_batch_idx += 1

    def prepare_for_decode(self) -> None:
        """Reclaim what is due, then one slot per request."""
        self.forward_mode = ForwardMode.DECODE
        self.maybe_evict_swa()
        for rank, info in enumerate(self.reqs_info):
            if not info.reqs:
                continue
            rows = np.array([req.req_pool_idx for req in info.reqs])
            lengths = np.array([req.kv_allocated_len for req in info.reqs], np.int32)
            info.seq_lens = lengths + 1
            if self.token_to_kv_pool_allocator.page_size == 1:
                info.out_cache_loc = alloc_token_slots(self.tree_cache, len(rows), dp_rank=rank)  # type: ignore[assignment]
            else:
                last = get_last_loc(self.req_to_token_pool.req_to_token, rows, lengths)
                info.out_cache_loc = self.alloc_paged_token_slots_decode(info.seq_lens, last, rank)
            self.req_to_token_pool.write((rows, lengths), info.out_cache_loc)
            for req in info.reqs:
                req.decode_batch_idx += 1
                req.kv_committed_len += 1
                req.kv_allocated_len += 1

    def alloc_paged_token_slots_decode(self, seq_lens: Int32, last_loc: Int32, dp_rank: int = 0) -> Int32:
        """One slot per sequence. Raises RuntimeError ("Decode out of memory") with what the cache can still say."""
        page = self.token_to_kv_pool_allocator.page_size
        demand = int(np.count_nonzero((np.asarray(seq_lens) - 1) % page == 0)) * page
        evict_from_tree_cache(self.tree_cache, demand, dp_rank)
        slots: Int32 | None = self.token_to_kv_pool_allocator.alloc_decode(
            seq_lens, last_loc, dp_rank=dp_rank
        )
        if slots is None:
            try:
                state = available_and_evictable_str(self.tree_cache, dp_rank)
            except Exception as error:
                state = f"unavailable ({type(error).__name__})\n"
            raise RuntimeError(
                f"Decode out of memory. Tried to allocate {len(seq_lens)} tokens on {dp_rank=}.\n{state}"
                f"{_lru_statistics(self.tree_cache)}"
            )
        return slots

    # ------------------------------------------------------------------------------------------------------------- reclaim
    def maybe_evict_swa(self, sliding_window_size: int | None = None) -> None:
        """Reclaim the tails that are due, by the cache's schedule."""
        window = sliding_window_size or getattr(self.model_config, "sliding_window", None)
        if not self.is_hybrid or not window or window <= 0 or self.forward_mode is None:
            return
        page = self.token_to_kv_pool_allocator.page_size
        schedule = _reclaim_schedule(self.tree_cache)
        # The unified tree is called by name; a batch built by hand may have no ``_evict_swa``.
        through_cache = hasattr(self.tree_cache, "tree_components") or not hasattr(self, "_evict_swa")
        for rank, info in enumerate(self.reqs_info):
            if self.forward_mode.is_decode():
                offset = schedule.decode_offset_overlap if self.enable_overlap else schedule.decode_offset
                interval = reclaim_interval(window, page)
                due = [
                    (req, req.seqlen - 1)
                    for req in info.reqs or ()
                    if _due(req.decode_batch_idx, offset, interval)
                ]
            elif self.forward_mode.is_extend() and schedule.on_extend:
                due = list(_due_extends(info.reqs or (), info.prefix_lens, self.enable_overlap))
            else:
                due = []
            for req, pre_len in due:
                if through_cache:
                    self.tree_cache.evict_req_swa(req, pre_len, dp_rank=rank)
                else:
                    self._evict_swa(req, pre_len, window, page, dp_rank=rank)

    def _evict_swa(
        self, req: Req, pre_len: int, sliding_window_size: int, page_size: int, dp_rank: int = 0
    ) -> None:
        """The cache's reclaim where it owns one; over a bare dual allocator the request's slots are freed here."""
        if hasattr(self.tree_cache, "evict_req_swa"):
            self.tree_cache.evict_req_swa(req, pre_len, dp_rank=dp_rank)
            return
        old, new = reclaim_boundary(req.swa_evicted_seqlen, 0, pre_len, sliding_window_size, page_size)
        if new > old:
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, old:new]
            self.token_to_kv_pool_allocator.free_swa(np.array(row, np.int32), dp_rank=dp_rank)
            req.swa_evicted_seqlen = new

    # ------------------------------------------------------------------------------------------------------------- pressure
    def check_decode_mem(self) -> bool:
        """Whether the next decode step fits on every rank, after evicting what it lacks (D45: whole pages)."""
        page = self.token_to_kv_pool_allocator.page_size
        demand = {
            rank: sum(new_pages(req.kv_allocated_len, req.kv_allocated_len + 1, page) for req in info.reqs)
            * page
            for rank, info in enumerate(self.reqs_info)
        }
        self._evict_tree_cache_if_needed(demand)
        return self._is_available_size_sufficient(demand)

    def _evict_tree_cache_if_needed(self, num_tokens: Mapping[int, int]) -> None:
        for rank, tokens in num_tokens.items():
            evict_from_tree_cache(self.tree_cache, tokens, rank)

    def _is_available_size_sufficient(self, num_tokens: Mapping[int, int]) -> bool:
        allocator = self.token_to_kv_pool_allocator
        return all(allocator.available_size(dp_rank=rank) >= tokens for rank, tokens in num_tokens.items())

    def release_req(self, idx: int, dp_rank: int, remaining: int, server_args: Any) -> None:
        """Give up one request without inserting it, make room for the others' next token, and reset it for a retraction."""
        del server_args
        req = self.reqs_info[dp_rank].reqs[idx]
        release_kv_cache(req, self.tree_cache, is_insert=False, allow_overallocated=True)
        page = self.token_to_kv_pool_allocator.page_size
        self._evict_tree_cache_if_needed({dp_rank: remaining * page})
        req.reset_for_retract()

    def retract_all(self, server_args: Any) -> list[Req]:
        """Release every request; the batch is empty afterwards."""
        released: list[Req] = []
        for rank, info in enumerate(self.reqs_info):
            for idx, req in enumerate(info.reqs):
                self.release_req(idx, rank, len(info.reqs) - idx - 1, server_args)
                released.append(req)
            info.reqs = []
        return released

    def retract_decode(self, server_args: Any) -> list[Req]:
        """Release requests with the fewest output tokens until the next step fits, rank by rank; never the last one (D48)."""
        released: list[Req] = []
        for rank, info in enumerate(self.reqs_info):
            while len(info.reqs) > 1 and not self._rank_fits(rank):
                idx = min(
                    range(len(info.reqs)), key=lambda i: (len(info.reqs[i].output_ids), -info.reqs[i].seqlen)
                )
                released.append(info.reqs[idx])
                self.release_req(idx, rank, len(info.reqs) - 1, server_args)
                del info.reqs[idx]
        return released

    def _rank_fits(self, rank: int) -> bool:
        page = self.token_to_kv_pool_allocator.page_size
        reqs = self.reqs_info[rank].reqs
        tokens = sum(new_pages(req.kv_allocated_len, req.kv_allocated_len + 1, page) for req in reqs) * page
        self._evict_tree_cache_if_needed({rank: tokens})
        return self._is_available_size_sufficient({rank: tokens})


def _reclaim_schedule(tree_cache: Any) -> ReclaimSchedule:
    """The cache's own schedule; without one it depends on what the cache has: a reclaim, a tree, or neither."""
    schedule = getattr(tree_cache, "reclaim_schedule", None)
    if schedule is not None:
        return schedule  # type: ignore[no-any-return]
    if tree_cache is None:
        return _PLAIN_SCHEDULE
    if hasattr(tree_cache, "evict_req_swa"):
        return ReclaimSchedule()
    return _PLAIN_SCHEDULE if hasattr(tree_cache, "root_node") else _CHUNK_SCHEDULE


def _lru_statistics(tree_cache: Any) -> str:
    """Evictable tokens as the cache's candidates have them; a cache may lack the numbers or fail to give them."""
    parts = []
    for name in ("full_lru_list_evictable_size", "swa_lru_list_evictable_size"):
        try:
            parts.append(f"{name}={getattr(tree_cache, name)()}")
        except Exception as error:
            parts.append(f"{name} unavailable ({type(error).__name__})")
    return ", ".join(parts)


def _due(step: int, offset: int, interval: int) -> bool:
    return step >= offset and (step - offset) % interval == 0


def _due_extends(reqs: Iterable[Req], prefix_lens: Sequence[int], overlap: bool) -> Iterable[tuple[Req, int]]:
    """(request, basis) of the extends whose prefix is processed: with overlap the newest chunk is still in flight (rule 9)."""
    for req, prefix in zip(reqs, prefix_lens):
        if not overlap:
            yield req, prefix
        elif req.extend_batch_idx >= _EXTENDS_IN_FLIGHT:
            yield req, prefix - (global_server_args_dict.get("chunked_prefill_size") or 0)
