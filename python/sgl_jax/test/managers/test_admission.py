"""Admission arithmetic as tables: the formulas alone, without a scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.managers.admission import (
    Room,
    chunk_end,
    clip_new_tokens,
    fit_extend,
    never_fits,
    refusal,
    request_need,
    reserved_by_running,
)
from sgl_jax.srt.managers.request import WaitReason
from sgl_jax.srt.mem_cache.sizing import CapRules


def rules(page=4, window=8, chunk=16, in_flight=1):
    return CapRules(page, window, chunk, chunks_in_flight=in_flight)


def i32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("total", "prefix", "new", "full", "swa"),
    [
        # FULL: pages of prompt + output + 1 page; SWA: at most what it owns, else max(prefill, decode peak) + 1 page
        (10, 0, 2, 12 + 4, 12 + 4),
        (16, 0, 100, 116 + 4, 24 + 4),  # decode peak = 8 + 8 + 2 * 4 = 24
        (64, 0, 0, 64 + 4, 16 + 16 + 4),  # a chunk of 16 and the residue ceil(8) + 2 pages
        (64, 48, 0, 16 + 4, 16 + 4),
    ],
)
def test_need_of_a_request(total, prefix, new, full, swa):
    assert request_need(total, prefix, new, rules()) == Room(full, swa)


def test_swa_need_does_not_grow_with_the_prompt():
    """D47: W=128, chunk 1024, prompt 100k, S=4096 is admissible."""
    shape = CapRules(128, 128, 1024)
    need = request_need(100_000, 0, 64, shape)
    assert need.swa == request_need(2_000_000, 0, 64, shape).swa <= 4096


def test_need_does_not_depend_on_an_earlier_deduction():
    """D38: S = 3 windows + 1 page; two requests whose chunk + window + page exceed it by a page: only the first fits."""
    shape = CapRules(4, 16, 12)
    need = request_need(24, 0, 8, shape)
    room = Room(10_000, 2 * need.swa - 4)
    assert refusal(need, room) is None
    assert refusal(need, Room(room.full, room.swa - need.swa)) is WaitReason.SWA_POOL


def test_full_margin_applies_to_hybrid_requests():
    """D38: the FULL page of margin is part of the need whether or not there is a window pool."""
    for window in (8, None):
        assert request_need(16, 0, 4, CapRules(4, window, 16)).full == 24


def test_running_requests_reserve_up_to_their_live_window():
    """D79: 50 long outputs over 100 windows: each reserves its decode peak once, not its output length."""
    shape = CapRules(1, 8, 64)
    budget = np.full(50, 10_000, np.int32)
    reserved = reserved_by_running(budget, np.full(50, 4, np.int32), np.zeros(50, np.int32), 0.5, shape)
    assert shape.decode_peak == 8 + 8 + 2
    assert reserved.swa == 50 * (18 - 4)


@pytest.mark.parametrize(
    ("budget", "owned", "unprefilled", "want"),
    [
        (0, 20, 0, Room(2, 0)),  # ending: only rounding
        (2, 8, 0, Room(1 + 2, 4)),  # never more than the tokens still to come (2, rounded to a page)
        (100, 8, 0, Room(50 + 2, 16)),
        (100, 8, 40, Room(40 + 50 + 2, 16)),
    ],
)
def test_reservation_of_one_running_request(budget, owned, unprefilled, want):
    assert reserved_by_running(i32(budget), i32(owned), i32(unprefilled), 0.5, rules()) == want


def test_no_running_requests_reserve_nothing():
    assert reserved_by_running(i32(), i32(), i32(), 1.0, rules()) == Room(0, 0)


@pytest.mark.parametrize(
    ("wanted", "start", "full", "swa", "fits"),
    [
        (16, 0, 100, 100, 16),
        (16, 0, 100, 16, 12),  # one page of SWA stays back
        (16, 0, 12, 100, 12),
        (16, 0, 100, 4, 0),  # a budget of nothing defers
        (16, 0, 100, 0, 0),  # never below zero
        (5, 6, 0, 100, 2),  # the half-filled page still has two slots
        (16, 8, 9, 100, 8),
    ],
)
def test_chunk_is_cut_to_what_both_pools_hold(wanted, start, full, swa, fits):
    """D43: budget = room - one page, page aligned, never negative; D41: a chunk shrinks to what the pool can hold."""
    assert fit_extend(wanted, start, Room(full, swa), rules()) == fits


@pytest.mark.parametrize(
    ("start", "total", "budget", "end"), [(0, 10, 16, 10), (0, 40, 16, 16), (16, 40, 7, 20), (16, 40, 3, 16)]
)
def test_chunks_end_on_pages(start, total, budget, end):
    assert chunk_end(start, total, budget, 4) == end


@pytest.mark.parametrize("page", [1, 2, 4, 16])
def test_largest_accepted_request_is_admissible_on_an_empty_rank(page):
    """D44: whatever entry accepts and clips, admission's need fits an empty rank."""
    capacity = Room(4096 // page * page, 4096 // page * page)
    shape = CapRules(page, 64, 256 // page * page)
    for prompt in (1, 10, 1000, 4096 - 2 * page - 1):
        assert never_fits(prompt, capacity, 100_000, 256, shape) is None
        new = clip_new_tokens(prompt, 1 << 30, capacity, 100_000, shape)
        assert new >= 1
        assert request_need(prompt, 0, new, shape).full <= capacity.full


@pytest.mark.parametrize(
    ("prompt", "capacity", "shape", "says"),
    [
        (200, Room(1000, 1000), rules(), "context length is 200.*--context-length"),
        (100, Room(100, 1000), rules(), "FULL KV pool.*100 slots.*at most 95.*--max-total-tokens"),
        (100, Room(1000, 1000), rules(chunk=None), "a step takes 64: set --chunked-prefill-size"),
        (60, Room(1000, 40), rules(chunk=None), "window KV pool.*a rank has 40.*--swa-full-tokens-ratio"),
        (60, Room(1000, 20), rules(), "window KV pool.*a rank has 20"),
    ],
)
def test_never_fit_names_value_limit_and_flag(prompt, capacity, shape, says):
    """D41: what no chunking can help is refused at entry."""
    refused = never_fits(prompt, capacity, 200, 64, shape)
    assert refused is not None
    import re

    assert re.search(says, refused.message), refused.message


def test_chunking_lets_a_long_prompt_through_a_small_window_pool():
    """D41: S = 20 992, chunk 32 768, prompt 20 742: chunked down, not refused."""
    shape = CapRules(128, 1024, 32_768)
    assert never_fits(20_742, Room(100_000, 20_992), 1 << 20, 32_768, shape) is None
