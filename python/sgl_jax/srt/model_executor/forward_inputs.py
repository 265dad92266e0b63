"""The seam between scheduler and worker: what one step is, in host arrays, and what comes back.

The scheduler builds a :class:`StepInputs` with unpadded, rank-local numpy arrays that nobody mutates afterwards (D33,
DECISIONS: host arrays handed to a step are copies). The worker pads them to its compiled shapes, launches the step and
returns a :class:`StepHandle`; launched steps run on the device in launch order.

Sequence ``b`` of a rank owns the query tokens ``[sum(extend_lens[:b]), sum(extend_lens[:b+1]))``; its keys are the positions
``[0, seq_lens[b])``. Page lists are flat and ragged::

    full_pages[full_page_start[b] : full_page_start[b + 1]]      logical pages 0, 1, 2, ... of sequence b
    swa_pages[swa_page_start[b] : swa_page_start[b + 1]]         logical pages swa_first_page[b], +1, ...

so window layers get only the pages their window can see.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class ForwardMode(IntEnum):
    """Kind of a step. Every sequence of a step has the same kind."""

    EXTEND = 1
    DECODE = 2

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """Penalties of one rank's rows; present only when some row has a non-neutral one.

    ``output_ids`` [B, H] and ``prompt_ids`` [B, Hp]: token history per row, padded with -1.
    ``frequency``, ``presence`` count output tokens; ``repetition`` (1.0 = off) looks at prompt and output. ``output_ids`` are those the
    host knows: an input token that comes through ``future_rows`` is added by the worker, so overlap changes nothing.
    """

    frequency: Float32
    presence: Float32
    repetition: Float32
    output_ids: Int32
    prompt_ids: Int32


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters of one rank's rows, each [B].

    ``temperature`` 0 = greedy; ``top_k`` <= 0 = off; ``seed``: per-request seed, combined with the position of the sampled
    token, so that a result never depends on what else is in the batch. ``bias_ids``/``bias_values`` [B, K]: additive logit
    bias, padded with id -1 (``logit_bias``; -inf entries enforce ``min_new_tokens``); None when no row has any.
    """

    temperature: Float32
    top_p: Float32
    top_k: Int32
    min_p: Float32
    seed: npt.NDArray[np.uint32]
    bias_ids: Int32 | None = None
    bias_values: Float32 | None = None
    penalties: PenaltyInputs | None = None


@dataclass(frozen=True, slots=True)
class RankInputs:
    """One DP rank's share of a step: B sequences, T query tokens. Empty arrays when the rank idles.

    ``future_rows`` [T] (decode under overlap): row of this rank in the *immediately preceding* launched step whose sampled token
    is this row's input, or -1 to take ``input_ids``; None when all inputs are known.
    ``full_loc`` / ``swa_loc`` [T]: slot each new token's K/V is written to. ``swa_*`` are None for non-hybrid models.
    ``logprob_targets`` [T]: next-token id per query token for prompt logprobs (-1 = not wanted); None when nobody asked.
    """

    input_ids: Int32
    positions: Int32
    extend_lens: Int32
    seq_lens: Int32
    full_loc: Int32
    full_pages: Int32
    full_page_start: Int32
    sampling: SamplingInputs
    swa_loc: Int32 | None = None
    swa_pages: Int32 | None = None
    swa_page_start: Int32 | None = None
    swa_first_page: Int32 | None = None
    future_rows: Int32 | None = None
    logprob_targets: Int32 | None = None

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)


def empty_rank(hybrid: bool) -> RankInputs:
    """A rank without sequences: what an idle rank hands over, and what precompilation runs."""
    ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
    start = np.zeros(1, np.int32)
    return RankInputs(
        input_ids=ints,
        positions=ints,
        extend_lens=ints,
        seq_lens=ints,
        full_loc=ints,
        full_pages=ints,
        full_page_start=start,
        sampling=SamplingInputs(floats, floats, ints, floats, np.empty(0, np.uint32)),
        swa_loc=ints if hybrid else None,
        swa_pages=ints if hybrid else None,
        swa_page_start=start if hybrid else None,
        swa_first_page=ints if hybrid else None,
    )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step over all ranks. ``top_logprobs`` = largest number of alternatives any row wants; ``return_logprobs``: any row wants some."""

    mode: ForwardMode
    ranks: tuple[RankInputs, ...]
    return_logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank's rows sampled.

    ``next_token_ids`` [B]; ``logprobs`` [B] of the sampled token; ``top_values``/``top_ids`` [B, k];
    ``input_logprobs`` [T] of ``logprob_targets``, with ``input_top_values``/``input_top_ids`` [T, k]. Logprobs are of the raw
    (temperature-free) distribution.
    """

    next_token_ids: Int32
    logprobs: Float32 | None = None
    top_values: Float32 | None = None
    top_ids: Int32 | None = None
    input_logprobs: Float32 | None = None
    input_top_values: Float32 | None = None
    input_top_ids: Int32 | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    ranks: tuple[RankResult, ...]


class StepHandle(Protocol):
    """A launched step. ``result`` blocks until the device is done; calling it again returns the same object."""

    def result(self) -> StepResult: ...


class Worker(Protocol):
    """What the scheduler needs from a model worker.

    ``kv_pool`` is the object the allocators are built over (SWAKVPool for hybrid models). ``max_batch`` and ``max_extend_tokens``
    bound a step per rank; ``vocab_size`` bounds token ids.
    """

    @property
    def kv_pool(self) -> object: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_batch(self) -> int: ...

    @property
    def max_extend_tokens(self) -> int: ...

    def launch(self, step: StepInputs) -> StepHandle: ...
