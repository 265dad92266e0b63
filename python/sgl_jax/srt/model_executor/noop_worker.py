"""Workers without a model, in plain numpy: for scheduler tests and host-overhead benchmarks.

* :class:`NoOpWorker` samples a hash of (last input token, position). It costs a few numpy calls per step.
* :class:`HashWorker` keeps a real paged memory of token ids in numpy and samples a hash of everything it reads back through
  the page tables, so a wrong slot, a page that changed hands too early or a missing window page changes or stops the
  output. Its tokens are a pure function of the token sequence: :func:`hash_reference` computes them without any paging.

Both import neither jax nor a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.window import first_visible
from sgl_jax.srt.model_executor.forward_inputs import (
    Int32,
    RankInputs,
    RankResult,
    StepHandle,
    StepInputs,
    StepResult,
)

_EMPTY = np.empty(0, np.int32)
_MIX_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_POS = np.uint64(0xC2B2AE3D27D4EB4F)


class PageContentError(AssertionError):
    """A page table led to a slot whose content belongs to another position or was never written."""


@dataclass(frozen=True, slots=True)
class ReadyHandle:
    """A step whose result is known at launch."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


def _hash(tokens: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    t = np.asarray(tokens, dtype=np.int64).astype(np.uint64) + np.uint64(1)
    p = np.asarray(positions, dtype=np.int64).astype(np.uint64) + np.uint64(1)
    h = t * _MIX_TOKEN ^ p * _MIX_POS
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    mixed: npt.NDArray[np.uint64] = h ^ (h >> np.uint64(32))
    return mixed


def _with_futures(rank: RankInputs, previous: Int32) -> Int32:
    """Input ids of the rank with the rows that come from the previous step filled in."""
    if rank.future_rows is None:
        return rank.input_ids
    rows = rank.future_rows
    return np.where(rows >= 0, previous[np.maximum(rows, 0)] if len(previous) else 0, rank.input_ids).astype(
        np.int32
    )


def _rank_result(step: StepInputs, rank: RankInputs, tokens: Int32, vocab_size: int) -> RankResult:
    """``tokens`` with made-up but well-shaped logprobs: alternative j is ``token + j`` at ``-(j + 1)``."""
    if not step.return_logprobs:
        return RankResult(tokens)
    k = step.top_logprobs
    ladder = np.arange(k, dtype=np.int32)
    queries = len(rank.input_ids)
    targets = rank.logprob_targets
    return RankResult(
        tokens,
        logprobs=np.full(len(tokens), -1.0, np.float32),
        top_values=np.tile(-(ladder + 1).astype(np.float32), (len(tokens), 1)),
        top_ids=(tokens[:, None] + ladder) % vocab_size,
        input_logprobs=None if targets is None else np.full(queries, -1.0, np.float32),
        input_top_values=None if targets is None else np.tile(-(ladder + 1).astype(np.float32), (queries, 1)),
        input_top_ids=None
        if targets is None
        else ((targets[:, None] + ladder) % vocab_size).astype(np.int32),
    )


class NoOpWorker:
    """Deterministic tokens without a model.

    The token sampled for a sequence of length ``n`` whose last input token is ``t`` is
    ``first_token_id + hash(t, n) % (vocab_size - first_token_id)``; it does not depend on chunking, batching or overlap.
    ``kv_pool`` is handed to the allocators as it is (any object they accept). ``steps`` counts launches.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        kv_pool: object = None,
        dp_size: int = 1,
        max_batch: int = 256,
        max_extend_tokens: int = 1 << 20,
        first_token_id: int = 3,
    ) -> None:
        if vocab_size <= first_token_id:
            raise ValueError(f"vocab_size {vocab_size} must be larger than first_token_id {first_token_id}")
        self._kv_pool = kv_pool
        self._vocab_size = vocab_size
        self._max_batch = max_batch
        self._max_extend_tokens = max_extend_tokens
        self.first_token_id = first_token_id
        self._previous: list[Int32] = [_EMPTY] * dp_size
        self.steps = 0

    @property
    def kv_pool(self) -> object:
        return self._kv_pool

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_batch(self) -> int:
        return self._max_batch

    @property
    def max_extend_tokens(self) -> int:
        return self._max_extend_tokens

    def launch(self, step: StepInputs) -> StepHandle:
        self.steps += 1
        results: list[RankResult] = []
        for index, rank in enumerate(step.ranks):
            if rank.batch_size == 0:
                tokens = _EMPTY
            else:
                inputs = _with_futures(rank, self._previous[index])
                tokens = self._sample(index, rank, inputs)
            self._previous[index] = tokens
            results.append(_rank_result(step, rank, tokens, self._vocab_size))
        return ReadyHandle(StepResult(tuple(results)))

    def _sample(self, rank_index: int, rank: RankInputs, inputs: Int32) -> Int32:
        """Next token of every sequence of the rank, [B]."""
        last = inputs[np.cumsum(rank.extend_lens) - 1]
        return self._to_ids(_hash(last, rank.seq_lens))

    def _to_ids(self, hashes: npt.NDArray[np.uint64]) -> Int32:
        span = np.uint64(self._vocab_size - self.first_token_id)
        return (hashes % span).astype(np.int32) + np.int32(self.first_token_id)


class HashWorker(NoOpWorker):
    """A numpy "model" with real paged memory: FULL keys and, with ``window``, SWA keys.

    ``pages_per_rank`` / ``swa_pages_per_rank`` count usable pages; page 0 exists besides. Every launch writes the new tokens
    to ``full_loc`` / ``swa_loc`` and reads all keys of every sequence back through the page lists.

    Raises:
        PageContentError: a table entry is out of range, is page 0, or leads to another position's content.
    """

    def __init__(
        self,
        vocab_size: int,
        page_size: int,
        pages_per_rank: int,
        *,
        window: int | None = None,
        swa_pages_per_rank: int = 0,
        dp_size: int = 1,
        kv_pool: object = None,
    ) -> None:
        super().__init__(vocab_size, kv_pool=kv_pool, dp_size=dp_size)
        self.page_size = page_size
        self.window = window
        shape = (dp_size, (pages_per_rank + 1) * page_size)
        self.full = np.full((2, *shape), -1, np.int64)  # [token | position, rank, slot]
        swa_shape = (dp_size, (swa_pages_per_rank + 1) * page_size)
        self.swa = np.full((2, *swa_shape), -1, np.int64)

    def _sample(self, rank_index: int, rank: RankInputs, inputs: Int32) -> Int32:
        full, swa = self.full[:, rank_index], self.swa[:, rank_index]
        self._write(full, rank.full_loc, inputs, rank.positions, "full_loc")
        if self.window is not None and rank.swa_loc is not None:
            self._write(swa, rank.swa_loc, inputs, rank.positions, "swa_loc")
        hashes = np.zeros(rank.batch_size, np.uint64)
        for row in range(rank.batch_size):
            length = int(rank.seq_lens[row])
            pages = rank.full_pages[rank.full_page_start[row] : rank.full_page_start[row + 1]]
            tokens = self._read(full, pages, 0, 0, length, "full_pages")
            seen = _hash(tokens, np.arange(length)).sum(dtype=np.uint64)
            if self.window is not None:
                seen ^= self._window_hash(swa, rank, row, length)
            hashes[row] = seen
        return self._to_ids(hashes)

    def _window_hash(self, swa: npt.NDArray[np.int64], rank: RankInputs, row: int, length: int) -> np.uint64:
        if rank.swa_pages is None or rank.swa_page_start is None or rank.swa_first_page is None:
            raise PageContentError("a hybrid step needs swa_pages, swa_page_start and swa_first_page")
        assert self.window is not None
        pages = rank.swa_pages[rank.swa_page_start[row] : rank.swa_page_start[row + 1]]
        # The earliest query of the step needs its whole window; the hash is over the last query's window.
        oldest = first_visible(length - int(rank.extend_lens[row]), self.window)
        tokens = self._read(swa, pages, int(rank.swa_first_page[row]), oldest, length, "swa_pages")
        begin = first_visible(length - 1, self.window)
        visible = tokens[begin - oldest :]
        return np.uint64(_hash(visible, np.arange(begin, length) + 7).sum(dtype=np.uint64))

    def _write(
        self, memory: npt.NDArray[np.int64], loc: Int32, tokens: Int32, positions: Int32, name: str
    ) -> None:
        if len(loc) and (loc.min() < self.page_size or loc.max() >= memory.shape[1]):
            raise PageContentError(
                f"{name}: slots must lie in [{self.page_size}, {memory.shape[1]}), got [{loc.min()}, {loc.max()}]"
            )
        memory[0, loc] = tokens
        memory[1, loc] = positions

    def _read(
        self, memory: npt.NDArray[np.int64], pages: Int32, first_page: int, begin: int, end: int, name: str
    ) -> npt.NDArray[np.int64]:
        """Tokens of positions ``[begin, end)`` through a page list that starts at logical page ``first_page``."""
        positions = np.arange(begin, end)
        logical = positions // self.page_size - first_page
        if len(logical) and (logical[0] < 0 or logical[-1] >= len(pages)):
            raise PageContentError(
                f"{name}: logical pages [{first_page}, {first_page + len(pages)}) do not cover [{begin}, {end})"
            )
        slots = pages[logical].astype(np.int64) * self.page_size + positions % self.page_size
        if len(slots) and (slots.min() < self.page_size or slots.max() >= memory.shape[1]):
            raise PageContentError(f"{name}: page 0 or a page out of range for positions [{begin}, {end})")
        wrong = np.flatnonzero(memory[1, slots] != positions)
        if len(wrong):
            at = int(positions[wrong[0]])
            raise PageContentError(
                f"{name}: slot {int(slots[wrong[0]])} holds position {int(memory[1, slots[wrong[0]]])}, expected {at}"
            )
        found: npt.NDArray[np.int64] = memory[0, slots]
        return found


def hash_reference(
    prompt: list[int], new_tokens: int, vocab_size: int, window: int | None = None, first_token_id: int = 3
) -> list[int]:
    """The tokens :class:`HashWorker` generates for ``prompt``, without paging."""
    tokens = list(prompt)
    span = np.uint64(vocab_size - first_token_id)
    for _ in range(new_tokens):
        length = len(tokens)
        seen = _hash(tokens, np.arange(length)).sum(dtype=np.uint64)
        if window is not None:
            begin = first_visible(length - 1, window)
            seen ^= _hash(tokens[begin:], np.arange(begin, length) + 7).sum(dtype=np.uint64)
        tokens.append(int(seen % span) + first_token_id)
    return tokens[len(prompt) :]
