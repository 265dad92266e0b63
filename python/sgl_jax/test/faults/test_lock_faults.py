"""Faults D20-D24 and fault 1: receipts release what was acquired, whatever happened in between."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sgl_jax.srt.mem_cache.errors import LockReceiptError
from sgl_jax.test.faults.kit import Kit, seq


def lock(kit: Kit, end: int) -> tuple[Any, Any]:
    node = kit.node(end)
    return node, kit.cache.inc_lock_ref(node).to_dec_params()


def unlock(kit: Kit, held: tuple[Any, Any]) -> None:
    kit.cache.dec_lock_ref(*held)


def split(kit: Kit, tokens: list[int], at: int) -> None:
    """A look-up that stops inside a node splits it there."""
    kit.match(tokens[:at])


def heal(kit: Kit, tokens: list[int], end: int) -> None:
    """A request recomputes ``[0, end)`` and leaves."""
    kit.insert(tokens[:end])


@pytest.mark.parametrize("between", ["nothing", "split", "tombstone", "tombstone_heal", "split_heal"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_all_release_orders_end_with_zero_locks(between: str, order: tuple[int, ...]) -> None:
    """D20: three locks on one chain; split at the boundary, tombstone above it, heal above it in between."""
    kit = Kit(window=4)
    tokens = seq(12)
    kit.insert(tokens)
    held = [lock(kit, 12), lock(kit, 8), lock(kit, 12)]
    assert kit.sums() == (0, 12, 4, 8)
    if between == "split":
        split(kit, tokens, 10)
        split(kit, tokens, 5)
        split(kit, tokens, 11)
    if between.startswith("tombstone"):
        assert kit.evict(swa=1) == (0, 4)
    if between == "split_heal":
        split(kit, tokens, 6)
        kit.evict(swa=1)
        split(kit, tokens, 2)
    if between.endswith("heal"):
        heal(kit, tokens, 6)
    for i in order:
        kit.assert_sound()
        unlock(kit, held[i])
    kit.assert_cold_after_evicting_all()


def test_a_skipped_tombstone_that_is_split_and_healed_stays_out_of_the_receipt() -> None:
    """Fault 1: R1 passes the tombstone [4,8); it is split at 6, healed and locked by R2; R1's release leaves R2 alone."""
    kit = Kit(window=4)
    tokens = seq(10)
    for end in (4, 8, 10):
        kit.insert(tokens[:end])
    hold = lock(kit, 4)
    assert kit.evict(swa=1) == (0, 4)
    unlock(kit, hold)
    assert kit.shape() == [(0, 4, True), (4, 8, False), (8, 10, True)]
    r1 = lock(kit, 10)
    assert r1[1].skip_lock_node_ids[1] == [kit.node(8).id]
    assert kit.sums() == (0, 10, 0, 6)
    kit.insert(tokens[:6] + seq(2, start=900))
    heal(kit, tokens, 8)
    assert {(v.start, v.end) for v in kit.views() if v.tokens[0] < 900} >= {
        (0, 4),
        (4, 6),
        (6, 7),
        (7, 8),
        (8, 10),
    }
    assert kit.match(tokens) == list(range(1, 11))
    (view,) = [v for v in kit.views() if v.end == 8 and v.tokens == [107]]
    r2 = (view.node, kit.cache.inc_lock_ref(view.node).to_dec_params())
    assert kit.sums()[3] == 10
    unlock(kit, r1)
    assert kit.sums()[3] == 4 and kit.sums()[1] == 8
    kit.evict(swa=1000)
    assert kit.sums()[3] == 4
    unlock(kit, r2)
    kit.evict(full=1000, swa=1000)
    assert kit.available() == (64, 64)


def test_healed_tombstones_count_by_their_own_locks() -> None:
    """Rule 4: a value that becomes live under somebody's FULL lock, outside the receipt, is evictable at once."""
    kit = Kit(window=4)
    tokens = seq(12)
    kit.insert(tokens)
    held = lock(kit, 12)
    kit.evict(swa=1)
    assert kit.sums() == (0, 12, 4, 4)
    heal(kit, tokens, 6)
    assert kit.sums() == (0, 12, 8, 4)
    kit.evict(swa=8)
    assert kit.sums() == (0, 12, 0, 4)
    unlock(kit, held)
    kit.evict(full=1000, swa=1000)
    assert kit.available() == (64, 64)


def test_a_release_without_the_receipt_is_refused() -> None:
    """D21: a path that forgot the parameters must not take another request's locks down."""
    kit = Kit(window=4)
    kit.insert(seq(16))
    r1, r2 = lock(kit, 16), lock(kit, 16)
    with pytest.raises(LockReceiptError):
        kit.cache.dec_lock_ref(r2[0], None)
    assert kit.sums() == (0, 16, 12, 4)
    unlock(kit, r2)
    assert kit.sums() == (0, 16, 12, 4)
    unlock(kit, r1)
    kit.assert_cold_after_evicting_all()


def test_a_rejected_request_leaves_the_others_protected() -> None:
    """D21: admitted, resumed after retract, rejected again: R1's window stays protected throughout."""
    kit = Kit(window=4)
    kit.insert(seq(16))
    r1 = lock(kit, 16)
    for _ in range(3):
        req = kit.admit(seq(20))
        kit.abort(req)
        req.reset_for_retract()
        assert kit.sums() == (0, 16, 12, 4)
    unlock(kit, r1)
    kit.assert_cold_after_evicting_all()


def test_swa_eviction_under_a_full_lock_only_tombstones() -> None:
    """D22: everything outside the locked window may go, FULL stays; commit and finish work afterwards."""
    kit = Kit(window=4)
    req = kit.admit(seq(16))
    kit.commit(req)
    for t in range(12):
        kit.cache.evict_req_swa(req, req.kv_committed_len, dp_rank=0)
        kit.decode(req, t)
    assert kit.evict(full=1000, swa=1000) == (0, 12)
    assert kit.shape() == [(0, 4, False), (4, 8, False), (8, 12, False), (12, 16, True)]
    assert kit.slots(req)[:16] == list(range(1, 17))
    kit.finish(req)
    kit.assert_cold_after_evicting_all()


def test_a_lock_pins_one_window_of_a_long_prefix() -> None:
    """D23: W=128, P=16, 10 000 tokens: 128 SWA tokens are protected, 9 872 evictable while locked."""
    kit = Kit(page=16, window=128, full=16000, swa=16000)
    kit.insert(seq(10_000))
    node = max(kit.views(), key=lambda v: v.end).node
    held = (node, kit.cache.inc_lock_ref(node).to_dec_params())
    assert kit.sums() == (0, 10_000, 9_872, 128)
    full, swa = kit.evict(swa=9_000)
    assert full == 0 and 9_000 <= swa <= 9_128
    unlock(kit, held)
    kit.evict(full=16000)
    assert kit.available() == (16000, 16000)


@pytest.mark.parametrize(("page", "window"), [(1, 4), (4, 9), (128, 100), (256, 300)])
def test_a_lock_protects_less_than_two_windows(page: int, window: int) -> None:
    """DECISIONS 4: whole nodes until W live tokens; live nodes never exceed ceil(W), so < 2 ceil(W)."""
    kit = Kit(
        page=page,
        window=window,
        full=16 * page + 8 * window // page * page,
        swa=16 * page + 8 * window // page * page,
    )
    for pages in (3, 4, 9, 14):
        kit.insert(seq(pages * page))
    node = max(kit.views(), key=lambda v: v.end).node
    receipt = kit.cache.inc_lock_ref(node).to_dec_params()
    protected = kit.sums()[3]
    limit = -(-window // page) * page
    assert window <= protected < 2 * limit
    unlock(kit, (node, receipt))
    kit.assert_cold_after_evicting_all()


def test_background_work_may_release_after_its_path_changed() -> None:
    """D24: parameters taken at enqueue time stay right after splits, a tombstone above, a heal and other releases."""
    kit = Kit(window=4, full=128, swa=128)
    tokens = seq(20)
    kit.insert(tokens)
    work = [lock(kit, end) for end in (20, 16, 12)]
    kit.evict(swa=1000)
    for at in (2, 7, 14, 19):
        split(kit, tokens, at)
    heal(kit, tokens, 9)
    kit.insert(tokens[:18] + seq(5, start=500))
    for held in (work[1], work[0], work[2]):
        unlock(kit, held)
        kit.assert_sound()
    kit.assert_cold_after_evicting_all()


def test_two_locks_share_the_boundary_and_a_split_moves_it() -> None:
    """RFC 4: the boundary id moves to the new parent instead of being copied; release still finds its end."""
    kit = Kit(window=4)
    kit.insert(seq(8))
    node = kit.node(8)
    first, second = kit.cache.inc_lock_ref(node), kit.cache.inc_lock_ref(node)
    assert first.swa_uuid_for_lock == second.swa_uuid_for_lock is not None
    split(kit, seq(8), 6)
    boundary = [
        v.end for v in kit.views() if v.node.component_data[1].metadata.get("component_uuid") is not None
    ]
    assert boundary == [6]
    assert kit.sums()[3] == 4
    unlock(kit, (node, first.to_dec_params()))
    unlock(kit, (node, second.to_dec_params()))
    kit.assert_cold_after_evicting_all()


def test_a_tombstone_made_under_the_lock_moves_no_other_sum() -> None:
    """D20, rule 4: a component's own eviction of a locked node takes the protected sum down and the receipt still fits."""
    kit = Kit(window=4)
    kit.insert(seq(8))
    held = lock(kit, 8)
    assert kit.sums() == (0, 8, 4, 4)
    assert kit.cache.components[1].evict_component(held[0]) == (4, 0)
    assert kit.sums() == (0, 8, 4, 0)
    kit.assert_sound()
    unlock(kit, held)
    assert kit.shape() == [(0, 4, True)] and kit.sums() == (4, 0, 4, 0)
    kit.assert_cold_after_evicting_all()


def test_each_receipt_releases_its_own_nodes() -> None:
    """D20: two locks end at one node; between them [4,8) was healed. The second's release leaves the first's nodes alone."""
    kit = Kit(window=8)
    tokens = seq(12)
    for end in (4, 8, 12):
        kit.insert(tokens[:end])
    top = kit.node(4)
    hold = kit.cache.inc_lock_ref(top).to_dec_params()
    kit.cache.components[1].evict_component(kit.node(8))
    kit.cache.dec_lock_ref(top, hold)
    assert kit.shape() == [(0, 4, True), (4, 8, False), (8, 12, True)]
    first = lock(kit, 12)
    assert first[1].swa_spans == ((0, 4), (8, 12)) and kit.sums()[3] == 8
    kit.insert(tokens[:8] + seq(2, start=900))
    assert kit.shape()[:2] == [(0, 4, True), (4, 8, True)]
    second = lock(kit, 12)
    assert second[1].swa_spans == ((0, 8),) and kit.sums()[3] == 12
    unlock(kit, second)
    assert kit.sums()[3] == 8
    kit.evict(swa=1000)
    assert [s for s in kit.shape() if s[1] <= 12] == [(0, 4, True), (4, 8, False), (8, 12, True)]
    unlock(kit, first)
    kit.assert_cold_after_evicting_all()
