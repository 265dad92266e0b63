"""Verdicts, owners of a slot, differences, fingerprints and crash bundles."""

import json

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.errors import LedgerViolationError
from sgl_jax.srt.mem_cache.ledger import (
    LedgerAuditError,
    audit_cache,
    build_snapshot,
    diff,
    readonly_fingerprint,
    validate_swa_cache_ledger,
    violations,
    who_owns,
    write_crash_bundle,
)
from sgl_jax.srt.mem_cache.ledger import audit as audit_module
from sgl_jax.srt.mem_cache.ledger.schema import MAPPING_DIAGNOSTICS, POOL_DIAGNOSTICS
from sgl_jax.test.mem_cache.ledger.test_snapshot import BareCache
from sgl_jax.test.mem_cache.legacy.kit import Desk, seq


def sound(**changes):
    base = build_snapshot(BareCache(), 0, [])
    return base | changes


def test_a_cold_ledger_is_sound():
    assert violations(sound(), require_idle=True) == []
    assert validate_swa_cache_ledger(sound(), require_idle=True) is None


@pytest.mark.parametrize(
    ("pool", "available", "side"),
    [("full", 15, "1 leaked"), ("full", 17, "1 counted twice"), ("swa", 8, "4 leaked")],
)
def test_a_balance_off_by_any_amount_is_named_with_all_numbers(pool, available, side):
    """D08: surplus is as serious as deficit."""
    with pytest.raises(ValueError, match=rf"\[{pool}\] balance mismatch.*{side}"):
        validate_swa_cache_ledger(sound(**{f"{pool}_available": available}), require_idle=False)


@pytest.mark.parametrize(
    "field", [f"{p}_{n}" for p in ("full", "swa") for n in POOL_DIAGNOSTICS] + list(MAPPING_DIAGNOSTICS)
)
def test_every_diagnostic_must_be_zero(field):
    with pytest.raises(ValueError, match=field):
        validate_swa_cache_ledger(sound(**{field: 1}), require_idle=False)


def test_mapped_slots_must_equal_swa_owners():
    with pytest.raises(ValueError, match="mapping_nonzero_count = 2"):
        validate_swa_cache_ledger(sound(mapping_nonzero_count=2), require_idle=False)


def test_idle_means_no_request_owner_and_no_slack():
    busy = sound(full_available=12, full_request_owned=3, full_reserved_page_slack=1)
    validate_swa_cache_ledger(busy, require_idle=False)
    with pytest.raises(ValueError, match="full_request_owned = 3"):
        validate_swa_cache_ledger(busy, require_idle=True)
    assert [v.kind for v in violations(busy, True)] == ["idle_request_owned", "idle_reserved_page_slack"]


def test_a_snapshot_without_the_newer_fields_still_validates():
    old = {k: v for k, v in sound().items() if "mismatch" not in k and "slack" not in k and "bucket" not in k}
    validate_swa_cache_ledger(old, require_idle=True)


def test_the_error_lists_every_violation_at_once():
    with pytest.raises(LedgerAuditError) as caught:
        validate_swa_cache_ledger(sound(full_available=15, swa_available=11), require_idle=True)
    assert [v.pool for v in caught.value.violations] == ["full", "swa"]
    assert isinstance(caught.value, LedgerViolationError)


def test_diff_names_the_fields_that_changed():
    assert diff(sound(), sound(full_available=15, full_tree_evictable=1)) == {
        "full_available": (16, 15),
        "full_tree_evictable": (0, 1),
    }


# ------------------------------------------------------------------------------------------------------------ who owns
def test_who_owns_a_slot_in_words():
    desk = Desk(page=4, window=4)
    desk.store(seq(8))
    desk.admit(seq(8) + seq(3, 700))
    tree = who_owns(desk.cache, 0, "full", 5, desk.live)
    assert [o.kind for o in tree.owners] == [
        "tree"
    ] and "token 1 of 8, protected, SWA live" in tree.describe()
    assert who_owns(desk.cache, 0, "full", 13, desk.live).describe() == (
        "rank 0, full slot 13 — request: rid r0 row 1 position 9"
    )
    peer = int(desk.allocator.translate_full_to_swa([13], dp_rank=0)[0])
    assert "rid r0 row 1 position 9" in who_owns(desk.cache, 0, "swa", peer, desk.live).describe()
    kinds = {
        slot: who_owns(desk.cache, 0, "full", slot, desk.live).owners[0].kind
        for slot in (0, 3, 15, 16, 67, 68)
    }
    assert kinds == {0: "reserved", 3: "reserved", 15: "slack", 16: "free", 67: "free", 68: "out_of_range"}
    with pytest.raises(ValueError, match="pool 'both'"):
        who_owns(desk.cache, 0, "both", 5, [])


def test_who_owns_tells_leaks_and_double_owners():
    cache = BareCache()
    slots = cache.alloc(3)
    cache.node(slots[:2])
    assert who_owns(cache, 0, "full", 3, []).owners[0].kind == "leaked"
    twice = who_owns(cache, 0, "full", 1, [cache.request(0, [1])])
    assert [o.kind for o in twice.owners] == ["tree", "request"] and "more than one owner" in twice.describe()


def test_faults_that_cancel_out_in_the_sums_are_found_slot_by_slot():
    """D08: one page leaked, one page freed while the tree owns it: every balance holds."""
    cache = BareCache(page=4)
    slots = cache.alloc(8)
    cache.node(slots[:4])
    cache.token_to_kv_pool_allocator.full_attn_allocator.free(slots[:4])
    snapshot = build_snapshot(cache, 0, [])
    assert snapshot["full_available"] + snapshot["full_tree_evictable"] == snapshot["full_capacity"]
    found = {v.kind: v.slots for v in audit_cache(cache, 0, [], require_idle=False) if v.pool == "full"}
    assert found["free_and_owned"] == (4,) and found["leaked"] == (8,)


def test_a_sound_rank_is_judged_without_looking_at_single_slots(monkeypatch):
    """DECISIONS 14, 15: the check of every idle edge costs what a snapshot costs; one freed page brings the slots back in."""
    desk = Desk(page=4, window=4)
    desk.insert(seq(12))
    looked = []
    monkeypatch.setattr(audit_module, "_pool_audit", lambda view, side: looked.append(side.name) or [])
    assert audit_cache(desk.cache, 0, [], require_idle=True) == [] and looked == []
    desk.cache.token_to_kv_pool_allocator.full_attn_allocator.free(np.arange(4, 8, dtype=np.int32))
    audit_cache(desk.cache, 0, [], require_idle=True)
    assert looked == ["full", "swa"]


def test_audit_of_an_idle_cache_finds_held_locks():
    desk = Desk()
    desk.insert(seq(4))
    held = desk.cache.inc_lock_ref(desk.node(4))
    assert [v.kind for v in audit_cache(desk.cache, 0, [], require_idle=True)] == ["idle_tree_protected"] * 2
    desk.cache.dec_lock_ref(desk.node(4), held.to_dec_params())
    assert audit_cache(desk.cache, 0, [], require_idle=True) == []


# ---------------------------------------------------------------------------------------------------------- fingerprint
def test_reading_leaves_the_fingerprint_and_any_change_of_ownership_moves_it():
    desk = Desk(page=4, window=4, dp=2)
    desk.store(seq(8), 1)
    req = desk.admit(seq(8) + seq(3, 700), 1)
    seen = [readonly_fingerprint(desk.cache, desk.live)]
    desk.cache.cache_ledger_snapshot(1, desk.live)
    who_owns(desk.cache, 1, "full", 5, desk.live)
    assert readonly_fingerprint(desk.cache, desk.live) == seen[0]
    changes = (
        lambda: desk.decode(req, 1),
        lambda: desk.allocator.full_to_swa_index_mapping[1].__setitem__(40, 9),
        lambda: desk.cache.inc_lock_ref(desk.node(8)),
        lambda: desk.insert(seq(4, 900), 0),
        lambda: setattr(req, "swa_evicted_seqlen", 12),
    )
    for change in changes:
        change()
        seen.append(readonly_fingerprint(desk.cache, desk.live))
    assert len(set(seen)) == len(seen)


# --------------------------------------------------------------------------------------------------------- crash bundle
def test_crash_bundle_holds_ledger_tree_last_operations_and_arguments(tmp_path):
    ops = [{"op": "insert", "n": i, "slots": np.int32(3)} for i in range(1500)]
    folder = write_crash_bundle(tmp_path / "new", [sound()], "root", ops, {"page_size": 4, "path": tmp_path})
    assert json.loads((folder / "ledger.json").read_text())[0]["full_capacity"] == 16
    lines = (folder / "operations.jsonl").read_text().splitlines()
    assert len(lines) == 1000 and json.loads(lines[0])["n"] == 500
    assert (folder / "tree.txt").read_text() == "root\n"
    assert json.loads((folder / "args.json").read_text())["page_size"] == 4
    assert write_crash_bundle(tmp_path / "new", [], "", [], {}) != folder
