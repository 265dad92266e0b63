"""The request's own bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.request import Req
from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams
from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.managers.world import make_world, prompt


def make(tokens=(5, 6, 7, 8), **extra):
    return Req("r", "", list(tokens), SamplingParams(), **extra)


def test_tokens_cross_the_prompt_end():
    req = make()
    req.output_ids = [9, 10]
    assert req.tokens(1, 3).tolist() == [6, 7]
    assert req.tokens(3, 6).tolist() == [8, 9, 10]
    assert req.tokens(5, 6).tolist() == [10]
    assert req.tokens(0, 6).dtype == np.int32


def test_radix_key_packs_each_token_once_and_follows_the_output():
    req = make(extra_key="tenant", dp_rank=1)
    first = req.radix_key(4)
    buffer = req.radix_tokens
    req.output_ids += [9, 10]
    assert req.radix_key(6) == RadixKey([5, 6, 7, 8, 9, 10], "tenant", 1)
    assert req.radix_tokens is buffer and first == RadixKey([5, 6, 7, 8], "tenant", 1)
    req.output_ids.append(11)
    assert req.radix_key(7).token_ids[-1] == 11
    with pytest.raises(ValueError, match="exceeds"):
        req.radix_key(8)


@pytest.mark.parametrize(
    ("start_len", "complete", "limit"),
    [(-1, False, 3), (0, False, 0), (1, False, 0), (3, False, 2), (3, True, 3)],
)
def test_match_stops_before_the_last_token_and_the_first_wanted_logprob(start_len, complete, limit):
    req = make(return_logprob=True, logprob_start_len=start_len)
    if complete:
        req.input_logprobs_complete = True
    assert req.adjust_max_prefix_ids() == limit


def test_committed_and_overallocated_are_popped_once():
    req = make()
    req.kv_committed_len, req.kv_allocated_len = 5, 8
    assert req.pop_committed_kv_cache() == 5 and req.pop_committed_kv_cache() == 0
    assert req.pop_overallocated_kv_cache() == (5, 8)
    start, end = req.pop_overallocated_kv_cache()
    assert start == end


def test_reset_for_retract_clears_everything_of_the_row():
    req = make()
    req.output_ids = [9]
    req.cache_protected_len = req.swa_evicted_seqlen = req.kv_allocated_len = 4
    req.swa_uuid_for_lock, req.cache_lock_params = 7, DecLockRefParams(7)
    req.reset_for_retract()
    assert (req.cache_protected_len, req.swa_evicted_seqlen, req.kv_allocated_len) == (0, 0, 0)
    assert (req.swa_uuid_for_lock, req.cache_lock_params) == (None, None)
    assert req.output_ids == [9] and req.is_retracted


def test_reset_for_retract_works_on_a_bare_object():
    bare = Req.__new__(Req)
    bare.reset_for_retract()
    assert bare.kv_committed_len == 0 and bare.cache_lock_params is None


def test_reset_clears_a_receipt_also_while_the_row_is_held():
    req = make()
    req.req_pool_idx, req.swa_uuid_for_lock, req.cache_lock_params = 0, 7, DecLockRefParams(7)
    req.reset_for_retract()
    assert (req.req_pool_idx, req.swa_uuid_for_lock, req.cache_lock_params) == (None, None, None)


@pytest.mark.parametrize("cache", ["unified", "legacy", "chunk", "plain", "plain_radix", "plain_chunk"])
def test_a_release_that_leaves_the_receipt_is_refused(cache):
    """Rule 3: every cache clears the receipt with the lock; one that forgot it would hold the lock for ever."""
    world = make_world(cache=cache, page=4)
    world.submit("a", prompt(9), 4)
    world.step(2)
    held = world.req("a").cache_lock_params
    assert held is not None
    finish = world.scheduler.memory.cache.cache_finished_req

    def forget(req, is_insert=True):
        finish(req, is_insert=is_insert)
        req.cache_lock_params = held

    world.scheduler.memory.cache.cache_finished_req = forget
    with pytest.raises(LockReceiptError, match="request a was released but still carries its lock receipt"):
        world.run()
