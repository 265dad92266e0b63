"""RFC-0035 sections 3 and 4: consumed boundaries, the three healing cases, healing under a lock, leaf cuts."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult
from sgl_jax.srt.mem_cache.errors import TreeInvariantError
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.mem_cache.unified.desk import FULL, GEOMETRY, GEOMETRY_IDS, SWA, Desk

geometry = pytest.mark.parametrize(("page", "dp"), GEOMETRY, ids=GEOMETRY_IDS)


def two_page_window(page: int, dp: int) -> Desk:
    """A window of two pages, so that a live node is at most two pages."""
    return Desk(page, window=2 * page, dp=dp)


@geometry
def test_a_new_leaf_is_cut_from_its_end_into_window_pieces(page: int, dp: int) -> None:
    """CONTRACT 7: the piece at the root is the short one; the deepest node ends the key."""
    desk = two_page_window(page, dp)
    assert desk.insert("abcde") == InsertResult(0)
    assert desk.picture() == ["/a S", "a/bc S", "abc/de S"]
    assert desk.match("abcde") == [1, 2, 3, 4, 5]
    assert desk.sums() == (5, 0, 5, 0)
    desk.sound()


@pytest.mark.parametrize(
    ("tokens", "window", "page", "lengths"),
    [
        (8, 4, 1, [4, 4]),
        (512, 128, 256, [256, 256]),
        (12, 4, 2, [4, 4, 4]),
        (10, 4, 2, [2, 4, 4]),
        (4, 4, 1, [4]),
    ],
)
def test_leaf_lengths_of_the_seam(tokens: int, window: int, page: int, lengths: list[int]) -> None:
    desk = Desk(page, window, full_pages=tokens // page, swa_pages=tokens // page)
    desk.cache.insert(InsertParams(RadixKey(list(range(tokens)), None, 0), desk.alloc(tokens // page)))
    found = sorted(desk.cache.iter_nodes(), key=lambda n: n.path_len())
    assert [len(n.key) for n in found] == lengths
    desk.sound()


def test_cursor_first_then_the_live_part_from_its_end() -> None:
    """DECISIONS 5: P=1, W=4, insert 12, cursor 7 → T[0,7), live [7,8) and [8,12)."""
    desk = Desk(1, 4)
    desk.insert("abcdefghijkl", cursor=7)
    assert desk.picture() == ["/abcdefg T", "abcdefg/h S", "abcdefgh/ijkl S"]
    assert desk.sums() == (12, 0, 5, 0)
    assert desk.match("abcdefghijkl") == list(range(1, 13))
    assert desk.match("abcdefghijk") == list(range(1, 12))
    assert desk.match("abcdefghij") == []


@geometry
def test_a_leaf_below_the_cursor_is_not_created(page: int, dp: int) -> None:
    """CONTRACT 7: its slots are freed, the matched length is returned unchanged."""
    desk = two_page_window(page, dp)
    desk.insert("ab")
    mine = np.concatenate([desk.slots(1, 2), desk.alloc(2)])
    desk.allocator.free_swa(mine[2 * page :], dp_rank=desk.rank)
    assert desk.insert("abcd", mine, prev=2, cursor=4) == InsertResult(2 * page)
    assert desk.picture() == ["/ab S"]
    assert desk.available() == (62, 62)
    desk.sound()


@geometry
def test_duplicates_of_live_nodes_are_freed_once_by_the_core(page: int, dp: int) -> None:
    """RFC 3: nobody consumes; the core frees the duplicate interval of both pools, the caller must not."""
    desk = two_page_window(page, dp)
    desk.insert("abcd")
    assert desk.insert("abcde") == InsertResult(4 * page)
    assert desk.match("abcde") == [1, 2, 3, 4, 9]
    assert desk.available() == (59, 59)
    desk.sound()


@geometry
def test_what_the_tree_owned_before_is_no_duplicate(page: int, dp: int) -> None:
    """``prev_prefix_len``: the first pages of the value are the tree's own slots."""
    desk = two_page_window(page, dp)
    desk.insert("abcd")
    value = np.concatenate([desk.slots(1, 2), desk.alloc(3)])
    assert desk.insert("abcde", value, prev=2) == InsertResult(4 * page)
    assert desk.match("abcde") == [1, 2, 3, 4, 7]
    assert desk.available() == (59, 59)
    desk.sound()


@geometry
def test_heal_case_1_boundary_before_the_node(page: int, dp: int) -> None:
    """RFC 4: the node adopts the whole slice; only its old FULL pages are freed."""
    desk = two_page_window(page, dp)
    desk.insert("abcd")
    desk.tombstone("ab")
    assert (desk.mapped(1, 2), desk.available()) == ([0, 0], (60, 62))
    assert desk.match("abcd") == [1, 2, 3, 4]
    assert desk.match("ab") == []
    desk.insert("ab")
    assert desk.picture() == ["/ab S", "ab/cd S"]
    assert desk.match("abcd") == [5, 6, 3, 4]
    assert (desk.mapped(1, 2), desk.mapped(5, 6)) == ([0, 0], [5, 6])
    assert desk.available() == (60, 60)
    desk.sound()


@geometry
@pytest.mark.parametrize("by", ["cursor", "prev"])
def test_heal_case_2_boundary_inside_the_node(page: int, dp: int, by: str) -> None:
    """RFC 4: split at the boundary; the original node is the healed suffix, its parent the new tombstone."""
    desk = two_page_window(page, dp)
    desk.insert("abcd")
    desk.tombstone("ab")
    node = desk.node("ab")
    if by == "cursor":
        mine = desk.alloc(2)
        desk.allocator.free_swa(mine[:page], dp_rank=desk.rank)
        desk.insert("ab", mine, cursor=1)
    else:
        desk.insert("ab", np.concatenate([desk.slots(1), desk.alloc(1)]), prev=1)
    assert desk.picture() == ["/a T", "a/b S", "ab/cd S"]
    assert desk.node("ab") is node and node.parent is desk.node("a")
    healed = 6 if by == "cursor" else 5
    assert desk.pages(node.component_data[FULL].value) == [healed]
    assert desk.match("abcd", full_only=True) == [1, healed, 3, 4]
    assert desk.mapped(1, 2, healed) == [0, 0, healed]
    assert desk.available() == (60, 61)
    desk.sound()


@geometry
@pytest.mark.parametrize("by", ["cursor", "prev"])
def test_heal_case_3_boundary_after_the_node(page: int, dp: int, by: str) -> None:
    """RFC 4: the tombstone stays and consumes nothing; what the request owned there is freed."""
    desk = two_page_window(page, dp)
    desk.insert("abcd")
    desk.tombstone("ab")
    if by == "cursor":
        mine = desk.alloc(2)
        desk.allocator.free_swa(mine, dp_rank=desk.rank)
        assert desk.insert("ab", mine, cursor=2) == InsertResult(2 * page)
    else:
        assert desk.insert("ab", desk.slots(1, 2), prev=2) == InsertResult(2 * page)
    assert desk.picture() == ["/ab T", "ab/cd S"]
    assert desk.match("abcd") == [1, 2, 3, 4]
    assert desk.available() == (60, 62)
    desk.sound()


@geometry
def test_heal_under_a_foreign_full_lock_moves_the_mapping(page: int, dp: int) -> None:
    """Rule 1, D16: the locked node keeps FULL 1,2; the fresh SWA pages 5,6 are mapped to them; fresh FULL 5,6 are freed."""
    desk = two_page_window(page, dp)
    desk.insert("abcd")
    held = desk.lock("abcd")
    desk.tombstone("ab")
    desk.insert("ab")
    assert desk.match("abcd") == [1, 2, 3, 4]
    assert desk.mapped(1, 2, 5, 6) == [5, 6, 0, 0]
    assert desk.pages(desk.node("ab").component_data[SWA].value) == [5, 6]
    assert desk.available() == (60, 60)
    assert desk.sums() == (0, 4, 2, 2)
    desk.sound()
    desk.cache.dec_lock_ref(*held)
    assert desk.sums() == (4, 0, 4, 0)
    assert desk.evict(full=4) == (4, 4)
    assert desk.available() == (64, 64)


@geometry
def test_a_long_tombstone_is_cut_when_it_is_healed(page: int, dp: int) -> None:
    """DECISIONS 4: a healed value obeys the node limit like a new leaf, under a lock too."""
    desk = two_page_window(page, dp)
    mine = desk.alloc(7)
    desk.allocator.free_swa(mine[: 5 * page], dp_rank=desk.rank)
    desk.insert("abcdefg", mine, cursor=5)
    assert desk.picture() == ["/abcde T", "abcde/fg S"]
    held = desk.lock("abcdefg")
    desk.insert("abcde")
    assert desk.picture() == ["/a S", "a/bc S", "abc/de S", "abcde/fg S"]
    assert desk.match("abcdefg") == [1, 2, 3, 4, 5, 6, 7]
    assert desk.mapped(1, 2, 3, 4, 5) == [8, 9, 10, 11, 12]
    assert desk.sums() == (0, 7, 5, 2)
    desk.sound()
    desk.cache.dec_lock_ref(*held)
    desk.sound()


def test_the_minimum_boundary_over_components_is_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 3: FULL says 4, SWA says 2 → [0, 2) is the duplicate, [2, 4) has an owner."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    freed: list[list[int]] = []
    monkeypatch.setattr(desk.cache.applier, "free", lambda slots, rank: freed.append(slots.tolist()))
    swa = desk.cache.components[SWA]
    monkeypatch.setattr(swa, "update_component_on_insert_overlap", lambda *a: 2)
    desk.cache.insert(InsertParams(desk.key("abcd"), desk.alloc(4)))
    assert freed == [[5, 6]]
    desk.cache.insert(InsertParams(desk.key("abcd"), desk.alloc(4), prev_prefix_len=1))
    assert freed == [[5, 6], [10]]


def test_a_boundary_outside_the_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(1, 4)
    desk.insert("abcd")
    monkeypatch.setattr(desk.cache.components[SWA], "update_component_on_insert_overlap", lambda *a: 5)
    with pytest.raises(TreeInvariantError, match="swa consumed from 5 of a node of 4 tokens"):
        desk.insert("abcd")


def test_the_overlap_hook_takes_positional_arguments() -> None:
    """CONTRACT 7: tests call it as (node, prefix_len, total_prefix_len, value_slice, params)."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    hook = desk.cache.components[SWA].update_component_on_insert_overlap
    fresh = desk.alloc(4)
    params = InsertParams(desk.key("abcd"), fresh)
    assert hook(desk.node("abcd"), 4, 0, fresh, params) == 4
    desk.tombstone("abcd")
    assert hook(desk.node("abcd"), 4, 0, fresh, params) == 0
    assert desk.node("abcd").component_data[FULL].value.tolist() == [5, 6, 7, 8]


def test_an_unmapped_donation_is_refused_before_anything_is_freed() -> None:
    """A heal with slots whose SWA is gone names rank and slots and leaves the tombstone as it was."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    desk.tombstone("abcd")
    mine = desk.alloc(4)
    desk.allocator.free_swa(mine[:1], dp_rank=0)
    before = desk.available()
    with pytest.raises(ValueError, match=r"dp_rank=0.*5"):
        desk.insert("abcd", mine)
    assert desk.available() == before and desk.picture() == ["/abcd T"]


def test_recovery_runs_once_per_auxiliary_component_before_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RFC 3: fresh slots unevict a FULL tombstone: SWA recovers while the FULL value is still absent, then FULL commits."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    node = desk.node("abcd")
    desk.tombstone("abcd")
    desk.allocator.free_full(desk.slots(1, 2, 3, 4), dp_rank=0)
    node.component_data[FULL].host_value = np.arange(4)
    desk.cache.accounts.set_value(node, FULL, None)
    assert node.evicted and desk.match("abcd") == []
    seen: list[bool] = []
    swa = desk.cache.components[SWA]
    recover = swa.recover_after_unevict

    def spy(*args: object) -> None:
        seen.append(node.component_data[FULL].value is None)
        recover(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(swa, "recover_after_unevict", spy)
    desk.insert("abcd")
    assert seen == [True]
    assert desk.match("abcd") == [5, 6, 7, 8]
    assert desk.pages(node.component_data[SWA].value) == [5, 6, 7, 8]
    assert desk.available() == (60, 60) and desk.sums() == (4, 0, 4, 0)


def test_recovery_above_the_cursor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of an unevicted node below the cursor comes back as a tombstone."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    node = desk.node("abcd")
    desk.tombstone("abcd")
    desk.allocator.free_full(desk.slots(1, 2, 3, 4), dp_rank=0)
    desk.cache.accounts.set_value(node, FULL, None)
    mine = desk.alloc(4)
    desk.allocator.free_swa(mine[:3], dp_rank=0)
    desk.insert("abcd", mine, cursor=3)
    assert desk.picture() == ["/abc T", "abc/d S"]
    assert desk.match("abcd", full_only=True) == [5, 6, 7, 8]
    desk.sound()


def test_one_component_leaves_duplicates_to_the_caller() -> None:
    """CONTRACT 8: with FULL alone the core frees nothing on overlap."""
    desk = Desk(1, 4, kinds=(FULL,))
    desk.insert("abcd")
    assert desk.insert("abcde") == InsertResult(4)
    assert desk.available()[0] == 64 - 9
    assert desk.match("abcde") == [1, 2, 3, 4, 9]


def test_short_keys_and_values() -> None:
    """D11: less than a page inserts nothing; too few slots are refused by name."""
    desk = Desk(128, 128)
    assert desk.cache.insert(InsertParams(RadixKey([1] * 127, None, 0), desk.slots(1))) == InsertResult(0)
    assert desk.picture() == []
    with pytest.raises(ValueError, match="insert of 128 tokens with 127 slots"):
        desk.cache.insert(InsertParams(RadixKey([1] * 128, None, 0), desk.slots(1)[:127]))
