"""The ledger of RFC-0035 section 6: literal snapshots of sound and of corrupted states."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.ledger import LEDGER_FIELDS, CacheLedger, OwnedNode, audit_cache, build_snapshot
from sgl_jax.srt.mem_cache.ledger.exact import tally_exact
from sgl_jax.srt.mem_cache.ledger.regular import tally_regular
from sgl_jax.srt.mem_cache.ledger.source import rank_view
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.test.mem_cache.legacy.kit import Desk, seq
from sgl_jax.test.stateful.build import build_allocator


class BareCache:
    """Pools plus hand-made nodes: the least a ledger can read."""

    def __init__(self, page: int = 1, full: int = 16, swa: int = 12, dp: int = 1, tree: bool = True) -> None:
        self.token_to_kv_pool_allocator = build_allocator(page, full // page, swa // page, dp)
        self.req_to_token_pool = ReqToTokenPool(4, 64)
        self.nodes: dict[int, list[OwnedNode]] = {}
        if tree:
            self.iter_ledger_nodes = lambda rank: iter(self.nodes.get(rank, []))

    def node(self, slots, swa=True, full_locked=False, swa_locked=False, rank=0):
        slots = np.asarray(slots, np.int32)
        peers = self.token_to_kv_pool_allocator.translate_full_to_swa(
            slots, dp_rank=rank, require_mapped=False
        )
        nodes = self.nodes.setdefault(rank, [])
        nodes.append(OwnedNode(len(nodes), slots, peers if swa else None, full_locked, swa_locked))

    def request(self, row, slots, protected=0, cursor=0, rank=None):
        self.req_to_token_pool.req_to_token[row, : len(slots)] = slots
        return SimpleNamespace(
            dp_rank=rank,
            req_pool_idx=row,
            cache_protected_len=protected,
            kv_allocated_len=len(slots),
            swa_evicted_seqlen=cursor,
        )

    def alloc(self, n, rank=0):
        return self.token_to_kv_pool_allocator.alloc(n, dp_rank=rank)


def nonzero(snapshot):
    return {k: v for k, v in snapshot.items() if v}


def test_the_schema_has_31_keys_in_one_order():
    assert len(LEDGER_FIELDS) == 31
    snapshot = build_snapshot(BareCache(), 0, [])
    assert tuple(snapshot) == LEDGER_FIELDS and all(type(v) is int for v in snapshot.values())
    assert CacheLedger.from_dict(snapshot).to_dict() == snapshot
    with pytest.raises(ValueError, match="full_capacity"):
        CacheLedger.from_dict({k: v for k, v in snapshot.items() if k != "full_capacity"})


def test_free_tree_and_request_are_counted_from_where_they_live():
    cache = BareCache()
    slots = cache.alloc(9)  # 1..9
    cache.node(slots[:3])
    cache.node(slots[3:5], full_locked=True, swa_locked=True)
    cache.token_to_kv_pool_allocator.free_swa(slots[5:6])
    req = cache.request(0, slots, protected=5, cursor=6)
    assert nonzero(build_snapshot(cache, 0, [req])) == {
        "full_capacity": 16,
        "full_available": 7,
        "full_tree_evictable": 3,
        "full_tree_protected": 2,
        "full_request_owned": 4,
        "swa_capacity": 12,
        "swa_available": 4,
        "swa_tree_evictable": 3,
        "swa_tree_protected": 2,
        "swa_request_owned": 3,
        "mapping_nonzero_count": 8,
    }


def test_a_healed_value_counts_by_its_own_swa_lock():
    """DECISIONS 6: FULL protected and SWA evictable at once."""
    cache = BareCache()
    cache.node(cache.alloc(4), full_locked=True, swa_locked=False)
    got = build_snapshot(cache, 0, [])
    assert (got["full_tree_protected"], got["swa_tree_evictable"], got["swa_tree_protected"]) == (4, 4, 0)


def test_slack_is_the_unowned_rest_of_owned_pages():
    """DECISIONS 12: 5 tokens in two pages of 4 leave 3; nothing is left when the page is released."""
    cache = BareCache(page=4)
    slots = cache.token_to_kv_pool_allocator.alloc_extend([0], [5], np.array([-1], np.int32), 5)
    got = build_snapshot(cache, 0, [cache.request(0, slots)])
    assert (got["full_request_owned"], got["full_reserved_page_slack"], got["swa_reserved_page_slack"]) == (
        5,
        3,
        3,
    )
    assert got["full_available"] == 8
    cache.token_to_kv_pool_allocator.free(slots)
    assert nonzero(build_snapshot(cache, 0, [])) == {
        "full_capacity": 16,
        "full_available": 16,
        "swa_capacity": 12,
        "swa_available": 12,
    }


def test_a_page_nobody_owns_is_a_leak_and_not_slack():
    """Upstream fault 5: the idle check at page > 1 passed with a whole page leaked in each pool."""
    cache = BareCache(page=4)
    cache.alloc(4)
    got = build_snapshot(cache, 0, [])
    assert (got["full_available"], got["full_reserved_page_slack"]) == (12, 0)


def test_two_rows_repeating_one_slot_twice_each_count_three():
    cache = BareCache()
    slot = int(cache.alloc(1)[0])
    reqs = [cache.request(0, [slot, slot]), cache.request(1, [slot, slot])]
    got = build_snapshot(cache, 0, reqs)
    assert (got["full_duplicate_request_owner_count"], got["swa_duplicate_request_owner_count"]) == (3, 3)
    assert got["full_request_owned"] == 1


def test_tree_duplicates_bucket_overlap_and_request_overlap():
    cache = BareCache()
    slots = cache.alloc(4)
    cache.node(slots)
    cache.node(slots[:2], full_locked=True, swa_locked=True)
    got = build_snapshot(cache, 0, [cache.request(0, slots[3:])])
    assert (got["full_duplicate_tree_owner_count"], got["full_tree_bucket_overlap_count"]) == (2, 2)
    assert (got["full_request_tree_overlap_count"], got["swa_request_tree_overlap_count"]) == (1, 1)


def test_one_request_object_listed_twice_counts_once():
    cache = BareCache()
    req = cache.request(0, cache.alloc(3))
    assert build_snapshot(cache, 0, [req, req])["full_duplicate_request_owner_count"] == 0


def test_a_request_without_a_row_owns_nothing():
    cache = BareCache()
    req = cache.request(0, cache.alloc(3))
    req.req_pool_idx = None
    assert build_snapshot(cache, 0, [req])["full_request_owned"] == 0


@pytest.mark.parametrize(
    ("write", "field", "count"),
    [
        ({1: 0}, "mapping_source_mismatch_count", 1),  # owned FULL without its peer
        ({9: 11}, "mapping_source_mismatch_count", 1),  # mapped FULL nobody owns
        ({1: 2}, "mapping_duplicate_count", 1),  # D05: two FULL slots share one SWA slot
        ({0: 5}, "mapping_invalid_count", 1),  # page 0 as a source
        ({1: 13}, "mapping_invalid_count", 1),  # a target beyond the pool
        ({1: 9}, "mapping_pair_mismatch_count", 1),  # the node stores another SWA slot
        ({1: 9}, "mapping_owner_mismatch_count", 2),
    ],
)
def test_mapping_faults_have_fields_of_their_own(write, field, count):
    cache = BareCache()
    cache.node(cache.alloc(4))
    for full, swa in write.items():
        cache.token_to_kv_pool_allocator.full_to_swa_index_mapping[full] = swa
    assert build_snapshot(cache, 0, [])[field] == count


def test_mismatches_count_only_positions_whose_swa_should_be_live():
    """DECISIONS 13: a tombstone's and a reclaimed position's missing mapping is right, not a fault."""
    cache = BareCache()
    slots = cache.alloc(8)
    cache.token_to_kv_pool_allocator.free_swa(slots[:6])
    cache.node(slots[:4], swa=False)
    got = build_snapshot(cache, 0, [cache.request(0, slots, protected=4, cursor=6)])
    assert {k: v for k, v in got.items() if k.startswith("mapping") and v} == {"mapping_nonzero_count": 2}


def test_node_slots_outside_the_pool_are_counted_and_not_lost():
    cache = BareCache()
    cache.nodes[0] = [OwnedNode(1, np.array([99, -3], np.int32), np.array([77, 78], np.int32), False, False)]
    got = build_snapshot(cache, 0, [])
    assert got["full_tree_evictable"] == 2 and got["swa_tree_evictable"] == 2
    assert got["mapping_source_mismatch_count"] == 2 and got["mapping_pair_mismatch_count"] == 2


def test_ranks_with_equal_local_slots_do_not_mix():
    """D49, D50: the same slot ids on two ranks belong to two ledgers."""
    cache = BareCache(dp=2, full=32, swa=24)
    cache.node(cache.alloc(3, rank=0), rank=0)
    req = cache.request(0, cache.alloc(5, rank=1), rank=1)
    zero, one = build_snapshot(cache, 0, [req]), build_snapshot(cache, 1, [req])
    assert (zero["dp_rank"], zero["full_tree_evictable"], zero["full_request_owned"]) == (0, 3, 0)
    assert (one["dp_rank"], one["full_tree_evictable"], one["full_request_owned"]) == (1, 0, 5)
    with pytest.raises(ValueError, match="dp_rank=2"):
        build_snapshot(cache, 2, [])


def test_without_a_tree_the_whole_row_is_request_owned():
    cache = BareCache(tree=False)
    got = build_snapshot(cache, 0, [cache.request(0, cache.alloc(6), protected=4)])
    assert got["full_request_owned"] == 6 and got["swa_request_owned"] == 6


def test_a_snapshot_creates_no_key_and_merges_no_free_list():
    desk = Desk(page=4)
    desk.store(seq(8))
    desk.evict(full=4)
    released = len(desk.allocator.full_attn_allocator.release_pages[0])
    assert released > 0
    desk.cache._tree.events.clear()
    desk.cache.cache_ledger_snapshot(0, [])
    assert desk.cache._ledger_event_totals == {}
    assert len(desk.allocator.full_attn_allocator.release_pages[0]) == released


def test_event_totals_are_cumulative():
    desk = Desk()
    desk.insert(seq(4))
    desk.insert(seq(8))
    desk.match(seq(8))
    desk.evict(swa=1)
    desk.insert(seq(8))
    desk.evict(full=100)
    got = desk.cache.cache_ledger_snapshot(0, [])
    assert (got["tombstone_created_total"], got["tombstone_healed_total"]) == (1, 1)
    assert (got["full_evicted_total"], got["swa_evicted_total"]) == (8, 12)


# ---------------------------------------------------------------------------------------- page-level equals token-level
def busy(page: int) -> tuple[Desk, list]:
    desk = Desk(page=page, window=page, full=page * 40, swa=page * 36)
    for start in range(3):
        desk.store(seq(page * 3, 1000 * page * (start + 1)))
    desk.match(seq(page, 1000 * page))
    desk.evict(swa=page)
    running = desk.admit(seq(page * 3, 2000 * page) + seq(page + 3, 7))
    desk.commit(running)
    desk.decode(running, 1)
    short = desk.admit(seq(3, 50))
    for token in range(3 * page):
        desk.decode(short, token)
    desk.reclaim(short, short.seqlen - 1)
    return desk, desk.live


@pytest.mark.parametrize("page", [1, 2, 8, 64])
def test_page_level_and_token_level_agree_on_sound_states(page):
    """DECISIONS 15: the fast tally is the exact one."""
    desk, reqs = busy(page)
    view = rank_view(desk.cache, 0, reqs)
    fast = tally_regular(view)
    assert fast is not None and fast == tally_exact(view)
    desk.assert_sound()


@pytest.mark.parametrize("damage", range(8))
def test_the_page_level_tally_steps_back_from_any_damage(damage):
    """One corrupted entry of any kind: the fast tally returns None and the exact one reports it."""
    page = 8
    desk, reqs = busy(page)
    mapping = desk.allocator.full_to_swa_index_mapping
    live = next(n for n in desk.cache._tree.nodes() if not n.swa_tombstone)
    first = int(live.value[0])
    if damage == 0:
        mapping[first + 1] = 0
    elif damage == 1:
        mapping[first : first + page] = mapping[first : first + page][::-1].copy()
    elif damage == 2:
        mapping[3] = 9
    elif damage == 3:
        mapping[first : first + page] = np.arange(page * 36 + page, page * 37 + page)
    elif damage == 4:
        desk.row(reqs[0])[reqs[0].kv_allocated_len - 1] += 1
    elif damage == 5:
        live.value[:page] = next(n.value[:page] for n in desk.cache._tree.nodes() if n is not live)
    elif damage == 6:
        live.value[0] = page * 500
    else:
        other = next(n for n in desk.cache._tree.nodes() if not n.swa_tombstone and n is not live)
        mapping[first : first + page] = mapping[other.value[:page]]
    view = rank_view(desk.cache, 0, reqs)
    assert tally_regular(view) is None
    assert audit_cache(desk.cache, 0, reqs, require_idle=False) != []
