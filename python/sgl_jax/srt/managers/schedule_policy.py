"""sglang-jax's prefill adder under its own names (CONTRACT 11), over the caps of ``mem_cache.sizing``.

The scheduler here admits through ``prefill.py``; this module serves code and tests written for sglang-jax, with the same budgets:
FULL and SWA, available plus evictable, less what running requests and the requests of this pass still need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from sgl_jax.srt.managers.admission import CLIP_NEW_TOKENS, UNLIMITED
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.window import peak_live_tokens

__all__ = ["AddReqResult", "PrefillAdder"]


class AddReqResult(Enum):
    """CONTINUE: look at the next request; NO_TOKEN: a pool is exhausted; OTHER: another limit is reached."""

    CONTINUE = auto()
    NO_TOKEN = auto()
    OTHER = auto()


class PrefillAdder:
    """Collects the requests of one extend batch. ``rem_*`` offsets are tokens per rank that are spoken for."""

    def __init__(
        self,
        page_size: int,
        tree_cache: Any,
        token_to_kv_pool_allocator: Any,
        running_batch: Any,
        new_token_ratio: float,
        rem_input_tokens: int,
        rem_chunk_tokens: int | None,
        mixed_with_decode_tokens: int = 0,
        dp_size: int = 1,
    ) -> None:
        self.page_size = page_size
        self.tree_cache = tree_cache
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.running_batch = running_batch
        self.new_token_ratio = new_token_ratio
        self.dp_size = dp_size
        self.rem_input_tokens = [rem_input_tokens - mixed_with_decode_tokens] * dp_size
        chunk = None if rem_chunk_tokens is None else rem_chunk_tokens - mixed_with_decode_tokens
        self.rem_chunk_tokens: list[int | None] = [chunk] * dp_size
        self.rem_total_token_offset = [mixed_with_decode_tokens] * dp_size
        self.rem_swa_token_offset = [mixed_with_decode_tokens] * dp_size
        self.can_run_list: dict[int, list[Req]] = {rank: [] for rank in range(dp_size)}
        self.new_chunked_reqs: list[Req | None] = [None] * dp_size
        self.is_hybrid = hasattr(type(token_to_kv_pool_allocator), "swa_available_size")
        window = getattr(tree_cache, "sliding_window_size", None)
        self.window: int = window if isinstance(window, int) and self.is_hybrid else 0
        for rank, info in enumerate(getattr(running_batch, "reqs_info", None) or []):
            for req in info.reqs or ():
                self._reserve_running(req, rank)

    def _reserve_running(self, req: Req, rank: int) -> None:
        left = max(0, min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_NEW_TOKENS))
        self.rem_total_token_offset[rank] += int(left * self.new_token_ratio)
        if self.window:
            live = req.kv_allocated_len - max(req.swa_evicted_seqlen, req.cache_protected_len)
            self.rem_swa_token_offset[rank] += max(0, min(self._peak, live + left) - live)

    @property
    def _peak(self) -> int:
        return peak_live_tokens(self.window, self.page_size)

    # ------------------------------------------------------------------------------------------------------------- budgets
    def rem_total_tokens(self, dp_rank: int = 0) -> int:
        """FULL tokens of a rank that nobody needs."""
        if self.is_hybrid:
            free = self.token_to_kv_pool_allocator.full_available_size(dp_rank=dp_rank)
            evictable = self.tree_cache.full_evictable_size(dp_rank)
        else:
            free = self.token_to_kv_pool_allocator.available_size(dp_rank=dp_rank)
            evictable = self.tree_cache.evictable_size(dp_rank)
        return int(free + evictable) - self.rem_total_token_offset[dp_rank]

    def rem_swa_tokens(self, dp_rank: int = 0) -> int:
        """SWA tokens of a rank that nobody needs."""
        if not self.window:
            return UNLIMITED
        free = self.token_to_kv_pool_allocator.swa_available_size(dp_rank=dp_rank)
        return int(free + self.tree_cache.swa_evictable_size(dp_rank)) - self.rem_swa_token_offset[dp_rank]

    def _swa_budget_for_req(self, extend_len: int, dp_rank: int = 0) -> int:
        """Whole pages of the larger of the next chunk and the decode peak: independent of the prompt's length (D47)."""
        if not self.window:
            return 0
        chunk = self.rem_chunk_tokens[dp_rank]
        piece = extend_len if chunk is None else min(extend_len, chunk)
        return ceil_page(max(piece, self._peak), self.page_size)

    # --------------------------------------------------------------------------------------------------------------- adding
    @contextmanager
    def _lock_node(self, node: Any) -> Iterator[None]:
        """Hold the node while a decision is made, so that its own prefix does not count as evictable."""
        params = self.tree_cache.inc_lock_ref(node).to_dec_params()
        try:
            yield
        finally:
            self.tree_cache.dec_lock_ref(node, params)

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a matched request, whole or its first chunk. Refused: nothing is changed."""
        rank = req.dp_rank or 0
        output = min(req.sampling_params.max_new_tokens, CLIP_NEW_TOKENS)
        return self._add(req, rank, req.extend_input_len + output + self.page_size)

    def add_one_req_ignore_eos(self, req: Req) -> AddReqResult:
        """As :meth:`add_one_req`, for a request that will produce all its tokens: nothing of its output is clipped."""
        rank = req.dp_rank or 0
        return self._add(
            req, rank, req.extend_input_len + req.sampling_params.max_new_tokens + self.page_size
        )

    def _add(self, req: Req, rank: int, total: int) -> AddReqResult:
        swa = self._swa_budget_for_req(req.extend_input_len, rank)
        with self._lock_node(req.last_node):
            if total >= self.rem_total_tokens(rank) or swa > self.rem_swa_tokens(rank):
                return AddReqResult.NO_TOKEN
            extend, chunk = req.extend_input_len, self.rem_chunk_tokens[rank]
            if ceil_page(extend, self.page_size) > self.rem_input_tokens[rank] and self.can_run_list[rank]:
                return AddReqResult.OTHER
            truncated = chunk is not None and extend > chunk
            if truncated:
                extend = floor_page(chunk or 0, self.page_size)
                if extend <= 0:
                    return AddReqResult.OTHER
                self._truncate(req, len(req.prefix_indices) + extend)
                self.new_chunked_reqs[rank] = req
            self._take_lock(req)
        self.can_run_list[rank].append(req)
        self._spend(rank, extend, total, swa)
        done = self.rem_input_tokens[rank] <= 0 or (
            chunk is not None and (self.rem_chunk_tokens[rank] or 0) <= 0
        )
        return AddReqResult.OTHER if done or truncated else AddReqResult.CONTINUE

    def add_chunked_req(self, req: Req) -> Req | None:
        """The next chunk of a request that is being prefilled. Returns the request while it has more to come, else None.

        Without SWA room ``fill_ids`` goes back to what is computed (D32) and the request is returned.
        """
        rank = req.dp_rank or 0
        start = len(req.prefix_indices)
        limit = [req.extend_input_len, max(0, self.rem_total_tokens(rank))]
        chunk = self.rem_chunk_tokens[rank]
        if chunk is not None:
            limit.append(chunk)
        if self.window:
            limit.append(max(0, floor_page(self.rem_swa_tokens(rank) - self.page_size, self.page_size)))
        extend = min(limit)
        truncated = extend < req.extend_input_len
        if truncated:
            extend = floor_page(extend, self.page_size)
        self._truncate(req, start + extend)
        if extend <= 0:
            return req
        self.can_run_list[rank].append(req)
        self._spend(rank, extend, extend, ceil_page(extend, self.page_size))
        return req if truncated else None

    def _truncate(self, req: Req, end: int) -> None:
        req.fill_ids = req.fill_ids[:end]
        req.extend_input_len = end - len(req.prefix_indices)

    def _take_lock(self, req: Req) -> None:
        result = self.tree_cache.inc_lock_ref(req.last_node)
        req.cache_lock_params = result.to_dec_params()
        req.swa_uuid_for_lock = result.swa_uuid_for_lock

    def _spend(self, rank: int, extend: int, total: int, swa: int) -> None:
        self.rem_total_token_offset[rank] += ceil_page(total, self.page_size)
        self.rem_swa_token_offset[rank] += swa
        self.rem_input_tokens[rank] -= ceil_page(extend, self.page_size)
        chunk = self.rem_chunk_tokens[rank]
        if chunk is not None:
            self.rem_chunk_tokens[rank] = chunk - extend
