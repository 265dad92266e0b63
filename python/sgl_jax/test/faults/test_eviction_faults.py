"""Faults D25-D29, D81, D83, D84, fault 9 and fault 10: who is evicted, in which order, at what cost."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.common import alloc_paged_token_slots_extend, alloc_token_slots
from sgl_jax.srt.mem_cache.unified_cache_components import LRURefreshPhase
from sgl_jax.test.counting import count_calls
from sgl_jax.test.faults.kit import Kit, seq


def live_tokens(kit: Kit, first: int) -> int:
    """Live SWA tokens of the branch whose ids start in the hundred of ``first``."""
    return sum(len(v.tokens) for v in kit.views() if v.swa is not None and first <= v.tokens[0] < first + 100)


def test_out_of_window_nodes_of_a_hot_branch_go_first() -> None:
    """D25: X (20 W) is matched again and again; all of its upper nodes are evicted before Y's tail."""
    kit = Kit(window=4, full=256, swa=256)
    x, y = seq(80, start=100), seq(8, start=1000)
    kit.insert(x)
    kit.insert(y)
    for _ in range(5):
        assert len(kit.match(x)) == 80
    while live_tokens(kit, 100) > 8:
        assert live_tokens(kit, 1000) == 8
        full, swa = kit.evict(swa=1)
        assert full == 0 and swa > 0
    assert len(kit.match(x)) == 80 and len(kit.match(y)) == 8


def test_one_evicted_node_does_not_turn_a_long_hit_into_nothing() -> None:
    """D26: branch of 10 W, aged; one eviction takes an upper node, the whole branch still matches."""
    kit = Kit(window=4, full=256, swa=256)
    branch = seq(40)
    kit.insert(branch)
    for i in range(3):
        kit.insert(seq(8, start=1000 * (i + 1)))
    kit.evict(swa=1)
    assert len(kit.match(branch)) == 40


def test_each_pool_is_evicted_by_its_own_deficit() -> None:
    """D27: SWA full of internal values, FULL half free: the allocation evicts SWA and succeeds."""
    kit = Kit(window=4, full=40, swa=12)
    kit.insert(seq(12))
    assert kit.available() == (28, 0)
    assert len(alloc_token_slots(kit.cache, 4, dp_rank=0)) == 4
    assert kit.available() == (24, 0)
    assert kit.sums() == (12, 0, 8, 0)
    kit.allocator.free(np.arange(13, 17, dtype=np.int32), dp_rank=0)
    kit.assert_cold_after_evicting_all()


def test_everything_evictable_can_be_had_in_both_pools() -> None:
    """D27, rule 10: what is counted evictable is evicted, leaf or internal, before an allocation fails."""
    kit = Kit(window=4, full=40, swa=24)
    for start in (100, 200):
        kit.insert(seq(12, start=start))
    assert kit.available() == (16, 0)
    assert len(alloc_token_slots(kit.cache, 24, dp_rank=0)) == 24


def test_the_cascade_stops_at_a_locked_tombstone() -> None:
    """D28, fault 9: P(tomb) - Q(tomb) - R(leaf), Q locked: R goes; P and Q stay until Q's release, then both go."""
    kit = Kit(window=4)
    kit.insert(seq(12))
    end = kit.node(12)
    hold = kit.cache.inc_lock_ref(end).to_dec_params()
    assert kit.evict(swa=1000) == (0, 8)
    q = kit.node(8)
    held = kit.cache.inc_lock_ref(q).to_dec_params()
    kit.cache.dec_lock_ref(end, hold)
    assert kit.evict(full=1000, swa=1000) == (4, 4)
    assert kit.shape() == [(0, 4, False), (4, 8, False)]
    assert kit.sums() == (0, 8, 0, 0) and kit.available() == (56, 64)
    kit.cache.dec_lock_ref(q, held)
    assert kit.views() == [] and kit.available() == (64, 64)
    kit.assert_idle()


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_an_unmatchable_chain_goes_with_its_leaf(pool: str) -> None:
    """Fault 9, rule 8: tombstone ancestors vanish with the last child, FULL slots included, counted exactly."""
    kit = Kit(window=4)
    req = kit.admit(seq(16))
    kit.cache.evict_req_swa(req, 16, dp_rank=0)
    kit.finish(req)
    assert kit.shape() == [(0, 11, False), (11, 12, True), (12, 16, True)]
    assert kit.evict(swa=1) == (0, 1)
    assert kit.evict(**{pool: 1}) == (16, 4)
    assert kit.views() == [] and kit.available() == (64, 64)


def test_round_robin_sessions_keep_hitting() -> None:
    """D29: four sessions re-sent with a short tail; from the second round on everything sent before is hit."""
    kit = Kit(window=4, full=1024, swa=1024)
    sessions = [seq(40, start=1000 * i) for i in range(1, 5)]
    for round_ in range(4):
        for i, tokens in enumerate(sessions):
            req = kit.admit(tokens)
            assert req.cache_protected_len == (0 if round_ == 0 else len(tokens) - 6)
            kit.commit(req)
            for t in range(3):
                kit.cache.evict_req_swa(req, req.kv_committed_len, dp_rank=0)
                kit.decode(req, 7 + t)
            sessions[i] = req.tokens() + [50 + round_] * 6
            kit.finish(req)


def test_node_arrays_hold_no_memory_of_evicted_parts() -> None:
    """D81: one long prefix, many diverging inserts, evict: each node owns its array, none is a view of a big one."""
    kit = Kit(page=16, window=64, full=8192, swa=8192)
    base = seq(2048)
    kit.insert(base)
    for cut in range(16, 2000, 80):
        kit.insert(base[:cut] + seq(32, start=10_000 + cut))
    kit.evict(full=1500, swa=500)
    held, live = 0, 0
    for view in kit.views():
        for data in view.node.component_data[:2]:
            if data.value is not None:
                array = data.value if data.value.base is None else data.value.base
                held, live = held + array.nbytes, live + data.value.nbytes
    assert held == live > 0


def _evict_cost(nodes: int) -> int:
    kit = Kit(window=4, full=8 * nodes + 64, swa=8 * nodes + 64, rows=4)
    for i in range(nodes):
        kit.insert([5, 6, 7, 8, 10_000 + i, 3, 2, 1])
    for view in [v for v in kit.views() if v.end == 8][: nodes // 2]:
        kit.cache.inc_lock_ref(view.node)
    kit.evict(swa=1)
    return count_calls(lambda: kit.evict(swa=1))


def test_evicting_one_node_does_not_depend_on_the_tree() -> None:
    """D83, fault 10: half of the tree locked; calls made by one eviction grow by < 1.5x from 100 to 1600 nodes."""
    assert _evict_cost(1600) < 1.5 * _evict_cost(100) + 10


def test_evicting_on_one_rank_ignores_the_other() -> None:
    """Fault 10: 800 older leaves of rank 1 cost rank 0 nothing."""

    def cost(others: int) -> int:
        kit = Kit(window=4, full=4 * others + 64, swa=4 * others + 64, dp=2, rows=4)
        for i in range(others):
            kit.insert([10_000 + i, 1, 2], rank=1)
        for i in range(4):
            kit.insert([10 + i, 1, 2], rank=0)
        kit.evict(full=1, rank=0)  # what earlier changes left to be filed, a bounded number
        return count_calls(lambda: kit.evict(full=1, rank=0))

    assert cost(800) < 1.5 * cost(10) + 10


def test_inserting_is_linear_in_tokens() -> None:
    """Fault 10: a leaf is cut in one pass; 4x the tokens cost at most 4.6x the calls."""

    def cost(tokens: int) -> int:
        kit = Kit(page=16, window=64, full=tokens + 64, swa=tokens + 64)
        req = kit.admit(seq(tokens))
        return count_calls(lambda: kit.finish(req))

    assert cost(16384) < 4.6 * cost(4096)


def test_a_partial_match_refreshes_the_matched_part_only() -> None:
    """D84: insert 8, touch others, match 4: the unmatched rest [4,8) keeps its age and is evicted first."""
    kit = Kit(window=8)
    old, other = seq(8), seq(8, start=500)
    kit.insert(old)
    kit.insert(other)
    assert len(kit.match(old[:4])) == 4
    assert kit.evict(full=1) == (4, 4)
    assert len(kit.match(old)) == 4 and len(kit.match(other)) == 8
    assert kit.evict(full=1) == (4, 4)
    assert len(kit.match(other)) == 8


def test_candidate_sums_survive_repeated_locking() -> None:
    """D11: a node that left and re-entered the candidates with its old age is counted once."""
    kit = Kit(window=4)
    kit.insert(seq(20))
    for end in (4, 8, 12, 8, 4, 12):
        node = kit.node(end)
        receipt = kit.cache.inc_lock_ref(node).to_dec_params()
        kit.cache.dec_lock_ref(node, receipt)
    assert kit.cache.swa_lru_list_evictable_size() == kit.cache.swa_evictable_size(0) == 20
    assert kit.cache.full_lru_list_evictable_size() == 20
    assert len(list(kit.cache.aux_evictable_device_nodes[1])) == 5


def test_values_outside_every_window_go_before_any_window() -> None:
    """D26: Y came later than X, yet Y's upper half goes before X's trailing window; both still match in full."""
    kit = Kit(window=4)
    x, y = seq(16), seq(16, start=500)
    kit.insert(x)
    kit.insert(y)
    assert kit.evict(swa=16) == (0, 16)
    assert len(kit.match(x)) == 16 and len(kit.match(y)) == 16


def test_eviction_for_a_batch_counts_its_pages() -> None:
    """D45, D27: three sequences that grow by one token each over a page boundary need three pages of eviction."""
    kit = Kit(page=4, window=4, full=24, swa=24)
    for start in (100, 200, 300, 400, 500, 600):
        kit.insert(seq(4, start=start))
    assert kit.available() == (0, 0)
    lasts = np.full(3, -1, np.int32)
    out = alloc_paged_token_slots_extend(kit.cache, [0, 0, 0], [1, 1, 1], lasts, 3, dp_rank=0)
    assert len(out) == 3 and kit.sums() == (12, 0, 12, 0)
    kit.allocator.free(out, dp_rank=0)
    kit.assert_cold_after_evicting_all()


def test_tombstones_use_up_the_refreshed_span() -> None:
    """D25, DECISIONS 2: W + P = 5 logical tokens above 10 are [5, 10): the tombstone [4,8) counts, [0,4) gets no stamp."""
    kit = Kit(window=4)
    for end in (4, 8, 10):
        kit.insert(seq(end))
    top, end = kit.node(4), kit.node(10)
    kit.cache.components[1].evict_component(kit.node(8))
    ages = [n.component_data[1].metadata["last_access_time"] for n in (top, end)]
    kit.cache.components[1].refresh_lru(LRURefreshPhase.MATCH_END, end, kit.cache.root_node)
    after = [n.component_data[1].metadata["last_access_time"] for n in (top, end)]
    assert after[0] == ages[0] and after[1] > ages[1]


def test_a_parent_inherits_the_age_of_its_last_leaf() -> None:
    """D84: X's head was used through its leaf after Z was; when the leaf is gone, Z goes before the head."""
    kit = Kit(window=4)
    x, z = seq(12), seq(4, start=500)
    kit.insert(x[:4])
    req = kit.admit(x)
    kit.insert(z)
    kit.commit(req)
    kit.finish(req)
    held = [(v.node, kit.cache.inc_lock_ref(v.node).to_dec_params()) for v in kit.views() if v.end == 4]
    assert len(held) == 2 and kit.evict(swa=8) == (8, 8)
    for node, receipt in held:
        kit.cache.dec_lock_ref(node, receipt)
    assert kit.evict(full=1) == (4, 4)
    assert kit.match(x[:4]) == [1, 2, 3, 4] and kit.match(z) == []
