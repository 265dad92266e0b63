"""NoOpWorker and HashWorker: deterministic, independent of chunking and overlap, and strict about page tables."""

import dataclasses

import numpy as np
import pytest

from sgl_jax.srt.model_executor.forward_inputs import ForwardMode, RankInputs, SamplingInputs, StepInputs
from sgl_jax.srt.model_executor.noop_worker import HashWorker, NoOpWorker, PageContentError, hash_reference


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def greedy(rows: int) -> SamplingInputs:
    return SamplingInputs(
        temperature=np.zeros(rows, np.float32),
        top_p=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.uint32),
    )


def one_row(tokens, start, page, pages, first=0, **changes) -> RankInputs:
    """Extend of one sequence; FULL and SWA use the same physical pages."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    table = np.array(pages, np.int32)
    loc = (table[positions // page] * page + positions % page).astype(np.int32)
    inputs = RankInputs(
        input_ids=i32(*tokens),
        positions=positions,
        extend_lens=i32(len(tokens)),
        seq_lens=i32(start + len(tokens)),
        full_loc=loc,
        full_pages=table,
        full_page_start=i32(0, len(table)),
        sampling=greedy(1),
        swa_loc=loc,
        swa_pages=table[first:],
        swa_page_start=i32(0, len(table) - first),
        swa_first_page=i32(first),
    )
    return dataclasses.replace(inputs, **changes)


def token(handle) -> int:
    return int(handle.result().ranks[0].next_token_ids[0])


def test_noop_result_does_not_depend_on_chunks_or_futures():
    whole, chunked = NoOpWorker(384), NoOpWorker(384)
    first = token(whole.launch(StepInputs(ForwardMode.EXTEND, (one_row([5, 6, 7], 0, 4, [1]),))))
    chunked.launch(StepInputs(ForwardMode.EXTEND, (one_row([5], 0, 4, [1]),)))
    assert token(chunked.launch(StepInputs(ForwardMode.EXTEND, (one_row([6, 7], 1, 4, [1]),)))) == first
    known = token(whole.launch(StepInputs(ForwardMode.DECODE, (one_row([first], 3, 4, [1]),))))
    future = one_row([0], 3, 4, [1], future_rows=i32(0))
    assert token(chunked.launch(StepInputs(ForwardMode.DECODE, (future,)))) == known


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_hash_worker_equals_reference(window, chunk):
    page, pages, prompt = 2, [3, 1, 7, 2, 5, 6, 4, 8], [9, 8, 7, 6, 5, 4, 3]
    worker = HashWorker(384, page, 8, window=window, swa_pages_per_rank=8)
    for begin in range(0, len(prompt), chunk):
        part = prompt[begin : begin + chunk]
        step = StepInputs(ForwardMode.EXTEND, (one_row(part, begin, page, pages),))
        last = token(worker.launch(step))
    out = [last]
    for _ in range(5):
        row = one_row([0], len(prompt) + len(out) - 1, page, pages, future_rows=i32(0))
        out.append(token(worker.launch(StepInputs(ForwardMode.DECODE, (row,)))))
    assert out == hash_reference(prompt, 6, 384, window)


def test_hash_worker_refuses_a_page_that_changed_hands():
    worker = HashWorker(384, 2, 4)
    worker.launch(StepInputs(ForwardMode.EXTEND, (one_row([1, 2, 3, 4], 0, 2, [1, 2]),)))
    worker.launch(StepInputs(ForwardMode.EXTEND, (one_row([5, 6, 7, 8], 0, 2, [3, 2]),)))
    worker.launch(StepInputs(ForwardMode.DECODE, (one_row([9], 4, 2, [3, 2, 4]),)))
    with pytest.raises(PageContentError, match="slot 6 holds position 0, expected 2"):
        worker.launch(StepInputs(ForwardMode.DECODE, (one_row([9], 4, 2, [1, 3, 4]),)))


def test_hash_worker_refuses_page_zero_and_a_short_window_table():
    worker = HashWorker(384, 2, 4, window=3, swa_pages_per_rank=4)
    with pytest.raises(PageContentError, match="full_loc"):
        worker.launch(StepInputs(ForwardMode.EXTEND, (one_row([1], 0, 2, [0]),)))
    worker.launch(StepInputs(ForwardMode.EXTEND, (one_row([1, 2, 3, 4], 0, 2, [1, 2]),)))
    with pytest.raises(PageContentError, match="swa_pages"):
        worker.launch(StepInputs(ForwardMode.DECODE, (one_row([9], 4, 2, [1, 2, 3], first=2),)))


def test_logprob_shapes():
    row = one_row([5, 6, 7], 0, 4, [1], logprob_targets=i32(6, 7, -1))
    step = StepInputs(ForwardMode.EXTEND, (row,), return_logprobs=True, top_logprobs=2)
    result = NoOpWorker(384).launch(step).result().ranks[0]
    assert result.logprobs.shape == (1,)
    assert result.top_ids.shape == result.top_values.shape == (1, 2)
    assert result.input_top_ids.shape == (3, 2)


def test_idle_rank_gives_empty_rows():
    empty = dataclasses.replace(
        one_row([5], 0, 4, [1]),
        input_ids=i32(),
        positions=i32(),
        extend_lens=i32(),
        seq_lens=i32(),
        full_loc=i32(),
        full_pages=i32(),
        full_page_start=i32(0),
        sampling=greedy(0),
    )
    result = NoOpWorker(384, dp_size=2).launch(
        StepInputs(ForwardMode.EXTEND, (one_row([5], 0, 4, [1]), empty))
    )
    assert [len(r.next_token_ids) for r in result.result().ranks] == [1, 0]
