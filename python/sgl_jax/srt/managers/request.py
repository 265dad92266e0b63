"""One request from arrival to its last token: tokens, the cache's view of it, and where it stands.

Positions are token offsets in the request's row (``req_to_token[req_pool_idx]``); intervals are half-open::

    [0, cache_protected_len)                          tree-owned, under the request's lock
    [cache_protected_len, kv_allocated_len)           request-owned FULL
    [max(swa_evicted_seqlen, protected), allocated)   request-owned SWA
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.io_struct import FinishReason, SamplingParams
from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams, MatchPrefixParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, TokenBuffer

Int32 = npt.NDArray[np.int32]
EMPTY_SLOTS: Int32 = np.empty((0,), np.int32)


class RequestState(Enum):
    """Where a request stands. WAITING -> PREFILL -> DECODE -> FINISHED; retraction goes back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class WaitReason(Enum):
    """Why a queued request is not running."""

    ARRIVED = "not looked at yet"
    PAUSED = "generation is paused"
    NO_SEAT = "max_running_requests reached"
    TOKEN_BUDGET = "prefill token budget of this step is used"
    CHUNK_AHEAD = "another prompt of this rank is being prefilled in chunks"
    FULL_POOL = "FULL pool has no room"
    SWA_POOL = "SWA pool has no room"
    BEHIND = "a request ahead in the queue has no room"
    RETRACTED = "retracted to make room for others"


class Req:
    """A request as scheduler and caches see it (CONTRACT 11). Token ids are packed once for radix keys.

    ``output_ids`` grows by processed tokens only. ``to_finish`` is an abort that waits for the last step in flight.
    """

    def __init__(
        self,
        rid: str,
        origin_input_text: str,
        origin_input_ids: list[int],
        sampling_params: SamplingParams,
        return_logprob: bool = False,
        return_output_logprob_only: bool = False,
        top_logprobs_num: int = 0,
        token_ids_logprob: list[int] | None = None,
        stream: bool = False,
        lora_id: str | None = None,
        extra_key: str | None = None,
        dp_rank: int | None = None,
        origin_input_ids_unpadded: list[int] | None = None,
        eos_token_ids: frozenset[int] | set[int] | None = None,
        vocab_size: int | None = None,
        radix_input_ids: list[int] | None = None,
        logprob_start_len: int = -1,
        received_at: float = 0.0,
    ) -> None:
        self.rid = rid
        self.origin_input_text = origin_input_text
        self.origin_input_ids = origin_input_ids
        self.origin_input_ids_unpadded = (
            origin_input_ids if origin_input_ids_unpadded is None else origin_input_ids_unpadded
        )
        self.radix_input_ids = origin_input_ids if radix_input_ids is None else radix_input_ids
        self.sampling_params = sampling_params
        self.return_logprob = return_logprob
        self.return_output_logprob_only = return_output_logprob_only
        self.top_logprobs_num = top_logprobs_num
        self.token_ids_logprob = token_ids_logprob
        self.logprob_start_len = logprob_start_len
        self.stream = stream
        self.lora_id = lora_id
        self.extra_key = extra_key
        self.dp_rank = dp_rank
        self.eos_token_ids = frozenset(eos_token_ids or ())
        self.vocab_size = vocab_size
        self.output_ids: list[int] = []
        self._prompt_array: Int32 = np.asarray(origin_input_ids, np.int32)
        self._radix_tokens: TokenBuffer | None = None
        self._init_progress(received_at)
        self.reset_for_retract()
        self.is_retracted = False

    def _init_progress(self, received_at: float) -> None:
        self.state = RequestState.WAITING
        self.wait_reason = WaitReason.ARRIVED
        self.finished_reason: FinishReason | None = None
        self.to_finish: FinishReason | None = None
        self.max_new_tokens = self.sampling_params.max_new_tokens
        self.seed = 0
        self.seat = -1
        self.received_at = received_at
        self.admitted_at: float | None = None
        self.retractions = 0
        self.cached_tokens = 0
        self.reported = 0
        self.output_logprobs: list[float] = []
        self.output_top: list[list[tuple[float, int]]] = []
        self.input_logprobs: list[float | None] = []
        self.input_top: list[list[tuple[float, int]] | None] = []
        self.input_logprobs_complete = not self.wants_input_logprobs
        self.input_logprobs_sent = False

    # ------------------------------------------------------------------------------------------------ cache-facing state
    def reset_for_retract(self) -> None:
        """Forget everything that belongs to the row, the lock receipt and its mirror too: release the request first.

        Tokens, counters of the client's view and the rank stay.
        """
        self.req_pool_idx: int | None = None
        self.prefix_indices: Int32 = EMPTY_SLOTS
        self.last_node: Any = None
        self.last_host_node: Any = None
        self.host_hit_length = 0
        self.fill_ids: list[int] = []
        self.extend_input_len = 0
        self.cache_protected_len = 0
        self.last_matched_prefix_len = 0
        self.full_hit_length = 0
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self.kv_committed_freed = False
        self.kv_overallocated_freed = False
        self.swa_evicted_seqlen = 0
        self.swa_uuid_for_lock: int | None = None
        self.cache_lock_params: DecLockRefParams | None = None
        self.processed_len = 0
        self.extend_batch_idx = 0
        self.decode_batch_idx = 0
        self.is_chunked = 0
        self.is_retracted = True

    def pop_committed_kv_cache(self) -> int:
        """Committed length, once; 0 afterwards (idempotent release)."""
        if self.kv_committed_freed:
            return 0
        self.kv_committed_freed = True
        return self.kv_committed_len

    def pop_overallocated_kv_cache(self) -> tuple[int, int]:
        """``[committed, allocated)``, once; an empty interval afterwards."""
        if self.kv_overallocated_freed:
            return self.kv_allocated_len, self.kv_allocated_len
        self.kv_overallocated_freed = True
        return self.kv_committed_len, self.kv_allocated_len

    @property
    def radix_tokens(self) -> TokenBuffer:
        """Prompt and processed output, packed once for radix keys and extended by the new tokens only."""
        buffer = self._radix_tokens
        if buffer is None:
            same = self.radix_input_ids is self.origin_input_ids
            buffer = self._radix_tokens = TokenBuffer(self._prompt_array if same else self.radix_input_ids)
        known = len(buffer) - len(self.radix_input_ids)
        if known < len(self.output_ids):
            buffer.extend(self.output_ids[known:])
        return buffer

    def radix_key(self, length: int) -> RadixKey:
        """Key over the first ``length`` tokens of prompt + output in the request's namespaces."""
        return self.radix_tokens.key(length, self.extra_key, self.dp_rank)

    # ------------------------------------------------------------------------------------------------ tokens and prefix
    @property
    def seqlen(self) -> int:
        """Prompt plus processed output tokens."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def wants_input_logprobs(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    def tokens(self, start: int, end: int) -> Int32:
        """Token ids ``[start, end)`` of prompt + output as int32 (a view of the prompt where possible)."""
        prompt = len(self._prompt_array)
        if end <= prompt:
            return self._prompt_array[start:end]
        tail = np.asarray(self.output_ids[max(0, start - prompt) : end - prompt], np.int32)
        return tail if start >= prompt else np.concatenate([self._prompt_array[start:], tail])

    def adjust_max_prefix_ids(self) -> int:
        """Longest prefix a match may give: the last token is always computed, and so is the first wanted prompt logprob."""
        limit = self.seqlen - 1
        if self.wants_input_logprobs and not self.input_logprobs_complete:
            limit = min(limit, max(0, self.logprob_start_len - 1))
        return limit

    def init_next_round_input(self, tree_cache: Any = None) -> None:
        """Match the prefix again and set ``fill_ids`` to all known tokens. Takes no lock and no slot."""
        self.fill_ids = self.origin_input_ids + self.output_ids
        if tree_cache is not None:
            result = tree_cache.match_prefix(
                MatchPrefixParams(key=self.radix_key(self.adjust_max_prefix_ids()), req=self)
            )
            self.prefix_indices = result.device_indices
            self.last_node = result.last_device_node
            self.last_host_node = result.last_host_node
            self.host_hit_length = result.host_hit_length
            self.full_hit_length = result.full_hit_length
            self.last_matched_prefix_len = len(result.device_indices)
        self.extend_input_len = len(self.fill_ids) - len(self.prefix_indices)

    # ------------------------------------------------------------------------------------------------------------ finish
    def finished(self) -> bool:
        return self.finished_reason is not None

    def check_finished(self) -> bool:
        """Whether the newest output token ends the request, without stop strings (see ``finish.py`` for those)."""
        from sgl_jax.srt.managers.finish import token_finish

        if self.finished_reason is None:
            self.finished_reason = self.to_finish or token_finish(self)
        return self.finished()

    def __repr__(self) -> str:
        return (
            f"Req(rid={self.rid!r}, state={self.state.value}, rank={self.dp_rank}, "
            f"prompt={len(self.origin_input_ids)}, output={len(self.output_ids)})"
        )
