"""The seats of one rank: requests that hold a row, with everything a decode step needs in flat arrays.

A seat is fixed for as long as its request runs, so a step in flight names its rows by seat; ``generation`` tells whether the
seat has changed hands since. Steady decode touches arrays only; the request object is brought up to date by :meth:`settle`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.request import Req, RequestState

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
UInt32 = npt.NDArray[np.uint32]

NEVER = -1


class RankSeats:
    """Arrays indexed by seat, ``[capacity]`` each.

    * ``length``: tokens whose slots are allocated (the request's ``kv_allocated_len``); ``processed``: those whose step was
      processed; ``reclaimed`` = max(SWA cursor, protected length).
    * ``unprefilled``: known tokens that no step has carried yet (a prompt in chunks).
    * ``budget``: output tokens that may still be launched; ``generated``: output tokens processed.
    * ``flight_step`` / ``flight_row``: last step that carried the seat and its row there.
    * ``attention`` marks seats whose results Python must look at: stop strings, stop ids, logprobs, pending aborts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reqs: list[Req | None] = [None] * capacity
        self._free = list(range(capacity))
        self.taken: Bool = np.zeros(capacity, np.bool_)
        self.decoding: Bool = np.zeros(capacity, np.bool_)
        self.generation: Int64 = np.zeros(capacity, np.int64)
        self.row: Int64 = np.zeros(capacity, np.int64)
        self.length: Int32 = np.zeros(capacity, np.int32)
        self.processed: Int32 = np.zeros(capacity, np.int32)
        self.reclaimed: Int32 = np.zeros(capacity, np.int32)
        self.unprefilled: Int32 = np.zeros(capacity, np.int32)
        self.budget: Int32 = np.zeros(capacity, np.int32)
        self.generated: Int32 = np.zeros(capacity, np.int32)
        self.max_new: Int32 = np.zeros(capacity, np.int32)
        self.min_new: Int32 = np.zeros(capacity, np.int32)
        self.decode_steps: Int32 = np.zeros(capacity, np.int32)
        self.last_token: Int32 = np.zeros(capacity, np.int32)
        self.flight_step: Int64 = np.full(capacity, NEVER, np.int64)
        self.flight_row: Int32 = np.zeros(capacity, np.int32)
        self.temperature: Float32 = np.zeros(capacity, np.float32)
        self.top_p: Float32 = np.ones(capacity, np.float32)
        self.top_k: Int32 = np.full(capacity, -1, np.int32)
        self.min_p: Float32 = np.zeros(capacity, np.float32)
        self.seed: UInt32 = np.zeros(capacity, np.uint32)
        self.heeds_eos: Bool = np.ones(capacity, np.bool_)
        self.attention: Bool = np.zeros(capacity, np.bool_)
        self.streams: Bool = np.zeros(capacity, np.bool_)
        self.penalised: Bool = np.zeros(capacity, np.bool_)
        self.biased: Bool = np.zeros(capacity, np.bool_)
        self.logprobs: Bool = np.zeros(capacity, np.bool_)
        self.top_logprobs: Int32 = np.zeros(capacity, np.int32)

    # ------------------------------------------------------------------------------------------------------- membership
    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def taken_count(self) -> int:
        return self.capacity - len(self._free)

    def requests(self) -> Iterator[Req]:
        """Seated requests, lowest seat first."""
        return (req for req in self.reqs if req is not None)

    def seat(self, req: Req) -> int:
        """Give the request the lowest free seat. Raises IndexError when there is none."""
        seat = heapq.heappop(self._free)
        sampling = req.sampling_params
        req.seat = seat
        self.reqs[seat] = req
        self.taken[seat], self.decoding[seat] = True, False
        self.row[seat] = req.req_pool_idx if req.req_pool_idx is not None else 0
        self.generated[seat] = len(req.output_ids)
        self.max_new[seat], self.min_new[seat] = req.max_new_tokens, sampling.min_new_tokens
        self.budget[seat] = req.max_new_tokens - len(req.output_ids)
        self.decode_steps[seat] = 0
        self.unprefilled[seat] = max(0, req.seqlen - req.kv_allocated_len)
        self.flight_step[seat] = NEVER
        self.temperature[seat], self.top_p[seat] = sampling.temperature, sampling.top_p
        self.top_k[seat], self.min_p[seat] = sampling.top_k, sampling.min_p
        self.seed[seat] = req.seed
        self.heeds_eos[seat], self.streams[seat] = not sampling.ignore_eos, req.stream
        self.logprobs[seat], self.top_logprobs[seat] = req.return_logprob, req.top_logprobs_num
        self.penalised[seat] = (
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        ) != (0.0, 0.0, 1.0)
        self.biased[seat] = bool(sampling.logit_bias) or sampling.min_new_tokens > 0
        self.attention[seat] = bool(sampling.stop or sampling.stop_token_ids or req.return_logprob)
        self.reread(req)
        return seat

    def vacate(self, req: Req) -> None:
        """The request leaves; results of steps in flight for this seat are dropped from now on."""
        seat = req.seat
        self.reqs[seat] = None
        self.taken[seat] = self.decoding[seat] = False
        self.generation[seat] += 1
        self.flight_step[seat] = NEVER
        req.seat = -1
        heapq.heappush(self._free, seat)

    # ---------------------------------------------------------------------------------------------------- synchronisation
    def reread(self, req: Req) -> None:
        """Copy the row's boundaries from the request, after an extend or a cache call changed them."""
        seat = req.seat
        self.length[seat] = req.kv_allocated_len
        self.processed[seat] = req.processed_len
        self.reclaimed[seat] = max(req.swa_evicted_seqlen, req.cache_protected_len)

    def settle(self, req: Req) -> None:
        """Bring the request up to date with what decode steps did to its seat.

        ::

            [0, processed)          committed: computed, may enter the cache
            [processed, length)     allocated for a step that is not processed, or that outran the request's end
        """
        seat = req.seat
        req.kv_allocated_len = int(self.length[seat])
        req.processed_len = req.kv_committed_len = int(self.processed[seat])
        req.decode_batch_idx = int(self.decode_steps[seat])

    def settle_all(self) -> None:
        for req in self.requests():
            self.settle(req)

    # ------------------------------------------------------------------------------------------------------------ queries
    def runnable(self) -> Int64:
        """Seats of the next decode step, ascending: decoding, and the step after the last launched one is still wanted."""
        return np.flatnonzero(self.decoding & (self.budget > 0))

    def start_decoding(self, req: Req) -> None:
        req.state = RequestState.DECODE
        self.decoding[req.seat] = True
