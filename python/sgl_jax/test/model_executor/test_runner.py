"""The runner on the Gemma 4 reference model: greedy tokens, chunking, overlap, batches, padding, logprobs."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.model_executor.forward_inputs import (
    ForwardMode,
    PenaltyInputs,
    SamplingInputs,
    StepInputs,
)
from sgl_jax.srt.model_executor.mesh import make_mesh
from sgl_jax.srt.model_executor.model_functions import functional
from sgl_jax.srt.model_executor.padding import PageGeometry, StepTooLargeError, build_padding_table
from sgl_jax.srt.model_executor.runner import ModelRunner
from sgl_jax.srt.model_executor.sampler import SampleKind
from sgl_jax.srt.model_executor.sampling_batch import SampleVariant
from sgl_jax.srt.models.registry import load_model
from sgl_jax.test.model_executor.driver import Driver, Sequence, greedy, make_pool

REFS = Path(__file__).parents[1] / "fixtures" / "refs" / "gemma4-tiny"
WINDOW, CONTEXT = 32, 256
FULL_TOKENS, SWA_TOKENS = 1536, 1536
TABLE = build_padding_table(4, 64, token_paddings=[16], bs_paddings=[4])


@functools.cache
def expected():
    with np.load(REFS / "expected.npz") as data:
        return {name: data[name] for name in data.files}


@functools.cache
def model():
    config = ModelConfig.from_path(REFS)
    mesh = make_mesh()
    return config, mesh, *functional(load_model(config, mesh))


@functools.cache
def runner(page):
    """One runner per page size, shared by the tests: a compiled step is dear."""
    config, mesh, functions, params = model()
    full, swa = FULL_TOKENS // page, SWA_TOKENS // page
    geometry = PageGeometry(page, CONTEXT, full, swa, WINDOW)
    return ModelRunner(functions, params, make_pool(config, mesh, page, full, swa), mesh, TABLE, geometry)


def driver(page=16, seed=0):
    return Driver(runner(page).launch, page, WINDOW, FULL_TOKENS // page, SWA_TOKENS // page, seed=seed)


def prompts():
    return expected()["greedy_prompts"].tolist()


@pytest.mark.parametrize(("page", "chunk", "overlap"), [(1, 64, True), (16, 20, False), (128, 64, True)])
def test_greedy_tokens_equal_the_reference(page, chunk, overlap):
    """Prompt alone, cut into chunks or not, decoding past the window; margins of the prompts are > 5e-3 where asserted."""
    want = expected()["greedy_tokens"][0][:48].tolist()
    assert driver(page).generate([prompts()[:1]], 48, chunk=chunk, overlap=overlap) == [[want]]


def test_batch_and_overlap_give_the_same_tokens():
    want = [t[:24].tolist() for t in expected()["greedy_tokens"]]
    for overlap in (False, True):
        assert driver(seed=3).generate([prompts()], 24, chunk=16, overlap=overlap) == [want]


def _sampling(work):
    rows = len(work)
    return SamplingInputs(
        temperature=np.full(rows, 0.8, np.float32),
        top_p=np.full(rows, 0.9, np.float32),
        top_k=np.full(rows, 20, np.int32),
        min_p=np.zeros(rows, np.float32),
        seed=np.array([hash(tuple(s.tokens[: s.prompt_len])) & 0xFFFFFFFF for s, _, _ in work], np.uint32),
    )


def test_seeded_sampling_does_not_depend_on_batch_or_overlap():
    together = driver(seed=1).generate([prompts()], 12, overlap=True, chunk=16, sampling=_sampling)[0]
    alone = [driver(seed=2).generate([[p]], 12, chunk=64, sampling=_sampling)[0][0] for p in prompts()]
    assert together == alone


def test_penalties_see_the_token_that_is_still_on_the_device():
    """A huge frequency penalty: no token repeats, with overlap on and off alike."""

    def sampling(work):
        base = greedy(len(work))
        rows = [s.tokens[s.prompt_len :] for s, _, _ in work]
        width = max(1, max(map(len, rows)))
        known = np.full((len(rows), width), -1, np.int32)
        for line, row in zip(known, rows):
            line[: len(row)] = row
        ones = np.ones(len(rows), np.float32)
        penalties = PenaltyInputs(ones * 1000, ones * 0, ones, known, np.full((len(rows), 1), -1, np.int32))
        return dataclasses.replace(base, penalties=penalties)

    plain, ahead = (
        driver().generate([prompts()[:2]], 12, chunk=16, overlap=o, sampling=sampling) for o in (False, True)
    )
    assert plain == ahead
    assert all(len(set(tokens)) == 12 for tokens in plain[0])


def test_prompt_logprobs_equal_the_reference_logits():
    ids = expected()["input_ids"][0][:60].tolist()
    logits = expected()["logits"][0][:60].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    seq = Sequence(ids, len(ids))
    result = driver().step(ForwardMode.EXTEND, [[(seq, 60, False)]], targets=True, top=3).result().ranks[0]
    np.testing.assert_allclose(result.input_logprobs[:59], want[np.arange(59), ids[1:]], atol=1e-3)
    assert np.array_equal(result.input_top_ids[:, 0], logits.argmax(-1))
    assert result.input_top_values.shape == (60, 3)
    assert result.next_token_ids.tolist() == [int(logits[-1].argmax())]
    np.testing.assert_allclose(result.logprobs[0], want[-1].max(), atol=1e-3)
    np.testing.assert_allclose(result.top_values[0], np.sort(want[-1])[:-4:-1], atol=1e-3)


def test_prompt_logprobs_in_small_blocks(monkeypatch):
    """Blocks that do not divide the padded length give the same numbers."""
    import sgl_jax.srt.model_executor.runner as module

    monkeypatch.setattr(module, "_PROMPT_LOGITS_BYTES", 4 * 384 * 7)
    config, mesh, functions, params = model()
    pool = make_pool(config, mesh, 16, 96, 96)
    small = ModelRunner(functions, params, pool, mesh, TABLE, PageGeometry(16, CONTEXT, 96, 96, WINDOW))
    ids = expected()["input_ids"][0][:14].tolist()
    results = []
    for launch in (small.launch, runner(16).launch):
        drive = Driver(launch, 16, WINDOW, 96, 96)
        handle = drive.step(ForwardMode.EXTEND, [[(Sequence(ids, 14), 14, False)]], targets=True, top=2)
        results.append(handle.result().ranks[0])
    np.testing.assert_allclose(results[0].input_logprobs, results[1].input_logprobs, atol=1e-5)
    assert np.array_equal(results[0].input_top_ids, results[1].input_top_ids)


def _pools(run):
    return [np.asarray(x) for x in jax.tree.leaves(run.pool.buffers())]


def test_padded_rows_never_touch_live_pages():
    """Warm-up steps of every shape, and a short step in a wide shape, change page 0 and the step's own slots only."""
    run = runner(16)
    before = _pools(run)
    for shape in TABLE.shapes():
        run.warm_up(shape, [SampleVariant(SampleKind.GREEDY)])
    for old, new in zip(before, _pools(run)):
        assert np.array_equal(old[1:], new[1:])
    drive = driver()
    seq = Sequence([5, 6, 7], 3)
    drive.step(ForwardMode.EXTEND, [[(seq, 3, False)]]).result()
    for leaf, (old, new) in enumerate(zip(before, _pools(run))):
        pages = seq.full if leaf // 2 in (2, 5) else seq.swa
        changed = {int(p) for p in np.argwhere((old != new).any(-1))[:, 0]} - {0}
        assert changed == {pages[0]}
        assert np.array_equal(old[pages[0], 3:], new[pages[0], 3:])


def test_padded_rows_read_nothing_live():
    """With every page outside the sequence's own poisoned by NaN, tokens stay those of the reference."""
    config, mesh, *_ = model()
    run = runner(16)
    saved, run.pool = run.pool, make_pool(config, mesh, 16, 96, 96, fill=np.nan)
    try:
        out = driver().generate([prompts()[:1]], 6, chunk=20)
        assert out == [[expected()["greedy_tokens"][0][:6].tolist()]]
    finally:
        run.pool = saved


def test_future_rows_follow_a_shrinking_and_reordered_batch():
    """A row's input is found by its row in the step before, wherever the row stands now."""
    drive = driver(seed=5)
    seqs = [Sequence(list(p), 48) for p in prompts()]
    for seq in seqs:  # prefill one by one, then a first decode together
        handle = drive.step(ForwardMode.EXTEND, [[(seq, 48, False)]])
        seq.tokens.append(int(handle.result().ranks[0].next_token_ids[0]))
    handles = [(seqs, drive.step(ForwardMode.DECODE, [[(s, 1, False) for s in seqs]]))]
    for rows in ([2, 0, 1], [1, 2], [2, 1], [2]):
        order = [seqs[i] for i in rows]
        handles.append((order, drive.step(ForwardMode.DECODE, [[(s, 1, True) for s in order]])))
    for order, handle in handles:
        for seq, token in zip(order, handle.result().ranks[0].next_token_ids):
            seq.tokens.append(int(token))
    for seq, want in zip(seqs, expected()["greedy_tokens"]):
        produced = seq.tokens[48:]
        assert produced == want[: len(produced)].tolist()
    assert [len(s.tokens) - 48 for s in seqs] == [3, 5, 6]


def test_result_is_cached_and_launch_does_not_wait():
    drive = driver()
    seq = Sequence(prompts()[0], 48)
    handle = drive.step(ForwardMode.EXTEND, [[(seq, 48, False)]])
    assert handle.result() is handle.result()


def test_a_step_beyond_the_limits_is_refused_and_harmless():
    run = runner(16)
    drive = driver()
    with pytest.raises(StepTooLargeError, match="--chunked-prefill-size"):
        drive.step(ForwardMode.EXTEND, [[(Sequence([1] * 70, 70), 70, False)]])
    assert all(not x.is_deleted() for x in jax.tree.leaves(run.pool.buffers()))
    assert driver().generate([prompts()[:1]], 3) == [[expected()["greedy_tokens"][0][:3].tolist()]]


def test_compile_count_is_bounded():
    """Any greedy step lands in one of the table's shapes: one forward and one sampler each."""
    config, mesh, functions, params = model()
    pool = make_pool(config, mesh, 16, 96, 96)
    run = ModelRunner(functions, params, pool, mesh, TABLE, PageGeometry(16, CONTEXT, 96, 96, WINDOW))
    for shape in TABLE.shapes():
        run.warm_up(shape, [SampleVariant(SampleKind.GREEDY)])
    forwards, samplers = run._forward._cache_size(), run._sample._cache_size()
    assert (forwards, samplers) == (3, 1)
    Driver(run.launch, 16, WINDOW, 96, 96).generate([prompts()], 5, chunk=16, overlap=True)
    Driver(run.launch, 16, WINDOW, 96, 96).generate([prompts()[:1]], 5, chunk=64)
    assert (run._forward._cache_size(), run._sample._cache_size()) == (forwards, samplers)


def test_host_arrays_may_change_after_launch():
    """D33: the scheduler's arrays are not read after launch."""
    drive = driver()
    captured = []

    def launch(step: StepInputs):
        captured.append(step)
        return runner(16).launch(step)

    drive.launch = launch
    seq = Sequence(prompts()[0], 48)
    handle = drive.step(ForwardMode.EXTEND, [[(seq, 48, False)]])
    rank = captured[0].ranks[0]
    for name in ("input_ids", "positions", "full_loc", "full_pages", "swa_loc", "swa_pages", "seq_lens"):
        getattr(rank, name)[:] = 0
    assert handle.result().ranks[0].next_token_ids.tolist() == [int(expected()["greedy_tokens"][0][0])]
