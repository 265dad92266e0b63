"""RFC-0035 section 4 and rule 3: window locks, the boundary id, and receipts that survive split, tombstone and heal."""

from __future__ import annotations

import itertools

import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams, IncLockRefResult
from sgl_jax.srt.mem_cache.errors import LockReceiptError, TreeInvariantError
from sgl_jax.srt.mem_cache.unified_cache_components import UnifiedTreeNode
from sgl_jax.test.mem_cache.unified.desk import FULL, GEOMETRY, GEOMETRY_IDS, SWA, Desk

geometry = pytest.mark.parametrize(("page", "dp"), GEOMETRY, ids=GEOMETRY_IDS)
UUID = "component_uuid"


@geometry
def test_a_lock_protects_the_path_in_full_and_one_window_in_swa(page: int, dp: int) -> None:
    """DECISIONS 4: whole nodes until W live tokens; D23: a long prefix pins one window, the rest stays evictable."""
    desk = Desk(page, 4 * page, dp)
    desk.insert("abcdefghij")
    node = desk.node("abcdefghij")
    result = desk.cache.inc_lock_ref(node)
    assert result.delta == -10 * page
    assert result.skip_lock_node_ids[SWA] == []
    assert result.swa_spans == ((0, 4 * page),)
    assert result.swa_uuid_for_lock == node.component_data[SWA].metadata[UUID]
    assert desk.sums() == (0, 10, 6, 4)
    assert [desk.node(x).component_data[FULL].lock_ref for x in ("ab", "abcdef", "abcdefghij")] == [1, 1, 1]
    assert desk.evict(swa=64) == (0, 6)
    assert desk.picture() == ["/ab T", "ab/cdef T", "abcdef/ghij S"]
    assert desk.cache.dec_lock_ref(node, result.to_dec_params()) == 0
    assert desk.sums() == (10, 0, 4, 0)
    desk.sound()


@geometry
def test_under_pressure_a_lock_is_narrowed_to_the_window(page: int, dp: int) -> None:
    """Whole nodes hold 6 pages for a window of 4; each of two requests gives up two, and the node is cut once."""
    desk = Desk(page, 4 * page, dp)
    desk.insert("abcdef")
    desk.insert("abcdefgh")
    first, second = desk.request("abcdefgh", "r1", tail=1), desk.request("abcdefgh", "r2", tail=1)
    assert desk.sums() == (0, 8, 2, 6)
    assert desk.cache.narrow_lock(first) and not desk.cache.narrow_lock(first)
    assert first.cache_lock_params.swa_spans == ((0, 4 * page),)
    assert desk.picture() == ["/ab S", "ab/cd S", "abcd/ef S", "abcdef/gh S"]
    assert desk.sums() == (0, 8, 2, 6)
    assert desk.cache.narrow_lock(second)
    assert desk.sums() == (0, 8, 4, 4)
    assert desk.evict(swa=64) == (0, 4)
    for req in (first, second):
        desk.cache.cache_finished_req(req, is_insert=False)
    assert desk.sums() == (8, 0, 4, 0)
    desk.sound()


def test_a_lock_within_its_window_has_nothing_to_give() -> None:
    desk = Desk(1, 4)
    fresh = desk.request("abc")
    assert not desk.cache.narrow_lock(fresh)  # holds the root only
    desk.cache.cache_unfinished_req(fresh)
    assert not desk.cache.narrow_lock(fresh)
    assert desk.sums() == (0, 3, 0, 3)


def test_a_lock_that_reaches_the_root_has_no_boundary() -> None:
    desk = Desk(1, 8)
    desk.insert("abc")
    result = desk.cache.inc_lock_ref(desk.node("abc"))
    assert (result.swa_uuid_for_lock, result.swa_spans) == (None, ((0, 3),))
    assert UUID not in desk.node("abc").component_data[SWA].metadata
    assert desk.cache.dec_lock_ref(desk.node("abc")) == 0
    assert desk.sums() == (3, 0, 3, 0)


def test_tombstones_are_passed_and_listed() -> None:
    """The window is counted in live tokens; spans jump over the tombstone."""
    desk = Desk(1, 6)
    desk.insert("abcdefghij")
    desk.match("abcdefg")
    desk.tombstone("abcdefg")
    assert desk.picture() == ["/abcd S", "abcd/efg T", "abcdefg/hij S"]
    result = desk.cache.inc_lock_ref(desk.node("abcdefghij"))
    assert result.skip_lock_node_ids[SWA] == [desk.node("abcdefg").id]
    assert desk.node("abcdefg").id in result.skip_lock_node_ids[SWA]
    assert result.swa_spans == ((0, 3), (6, 10))
    assert result.swa_uuid_for_lock == desk.node("abcd").component_data[SWA].metadata[UUID]
    assert desk.sums() == (0, 10, 0, 7)


def test_locks_share_the_boundary_and_the_id_stays() -> None:
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    node, first = desk.lock("abcdefgh")
    second = desk.cache.inc_lock_ref(node).to_dec_params()
    assert first.swa_uuid_for_lock == second.swa_uuid_for_lock
    assert node.component_data[SWA].lock_ref == node.component_data[FULL].lock_ref == 2
    desk.cache.dec_lock_ref(node, first)
    desk.cache.dec_lock_ref(node, second)
    assert node.component_data[SWA].metadata[UUID] == first.swa_uuid_for_lock
    assert desk.sums() == (8, 0, 8, 0)


def test_a_split_moves_the_boundary_to_the_new_parent() -> None:
    """RFC 4: moved, not copied; lock counts are on both halves; metadata are separate."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    node, receipt = desk.lock("abcd")
    upper = desk.cache._split_node(node.key, node, 1)
    assert upper.component_data[SWA].metadata[UUID] == receipt.swa_uuid_for_lock
    assert UUID not in node.component_data[SWA].metadata
    assert upper.component_data[SWA].metadata is not node.component_data[SWA].metadata
    assert [n.component_data[ct].lock_ref for n in (upper, node) for ct in (FULL, SWA)] == [1, 1, 1, 1]
    assert [n.component_data[ct].value.tolist() for n in (upper, node) for ct in (FULL, SWA)] == [
        [1],
        [1],
        [2, 3, 4],
        [2, 3, 4],
    ]
    desk.sound()
    desk.cache.dec_lock_ref(node, receipt)
    assert desk.sums() == (4, 0, 4, 0)
    desk.sound()


CHANGES = ["split", "split_twice", "tombstone", "tombstone_split", "tombstone_heal", "skipped_split_heal"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_receipts_release_what_was_taken_in_any_order(change: str, order: tuple[int, ...]) -> None:
    """D20, D24, rule 3, fault 1: three locks, a change in between, every release order; zero locks at the end."""
    desk = Desk(1, 6)
    desk.insert("abcdefghijkl")
    desk.match("abcdefghi")
    desk.tombstone("abcdefghi")
    assert desk.picture() == ["/abcdef S", "abcdef/ghi T", "abcdefghi/jkl S"]
    held = [desk.lock("abcdefghijkl"), desk.lock("abcdef"), desk.lock("abcdefghijkl")]
    assert desk.sums() == (0, 12, 0, 9)
    if change.startswith("split"):
        desk.match("abcdefghijk")
        desk.match("abc")
        if change == "split_twice":
            desk.match("abcd")
            desk.match("ab")
    if change.startswith("tombstone"):
        desk.tombstone("abcdef")
        if change == "tombstone_split":
            desk.match("abcd")
        if change == "tombstone_heal":
            desk.insert("abcdef")
    if change == "skipped_split_heal":
        desk.match("abcdefg")
        desk.insert("abcdefghi")
        held.append(desk.lock("abcdefghi"))
        order = (*order, 3)
    desk.sound()
    for i in order:
        desk.cache.dec_lock_ref(*held[i])
        desk.sound()
    assert (desk.sums()[1], desk.sums()[3]) == (0, 0)
    desk.evict(full=64)
    assert desk.available() == (64, 64)


def test_fault_1_a_skipped_tombstone_split_and_healed_keeps_the_other_lock() -> None:
    """Fault 1: R1 skipped the tombstone by id; it is split and healed, R2 locks the halves; R1's release leaves 4, not 0."""
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    desk.insert("abcdefghij")
    desk.tombstone("abcdefgh")
    r1 = desk.lock("abcdefghij")
    assert r1[1].skip_lock_node_ids[SWA] == [desk.node("abcdefgh").id]
    assert r1[1].swa_spans == ((0, 2), (6, 10))
    desk.match("abcdef")
    desk.insert("abcdefgh")
    r2 = desk.lock("abcdefgh")
    assert r2[1].swa_spans == ((0, 4),)
    assert desk.sums() == (0, 10, 0, 10)
    desk.cache.dec_lock_ref(*r1)
    assert desk.sums() == (2, 8, 6, 4)
    desk.cache.dec_lock_ref(*r2)
    assert desk.sums() == (10, 0, 10, 0)


def test_a_release_without_or_with_a_short_receipt_is_refused() -> None:
    """DECISIONS 6, D21: the lock returned a boundary, so None and a receipt without it are errors that change nothing."""
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    node, receipt = desk.lock("abcdefgh")
    for wrong in (
        None,
        DecLockRefParams(),
        DecLockRefParams(-5),
        DecLockRefParams(receipt.swa_uuid_for_lock, {}, ((0, 8),)),
    ):
        with pytest.raises(LockReceiptError, match="Pass the receipt of inc_lock_ref"):
            desk.cache.dec_lock_ref(node, wrong)
    assert desk.sums() == (0, 8, 4, 4)
    desk.cache.dec_lock_ref(node, receipt)
    with pytest.raises(LockReceiptError, match="released twice or never taken"):
        desk.cache.dec_lock_ref(node, receipt)
    with pytest.raises(LockReceiptError):
        desk.cache.dec_lock_ref(node)
    assert desk.sums() == (8, 0, 8, 0)
    desk.sound()


def test_hand_built_parameters_release_by_boundary_and_list() -> None:
    """CONTRACT 3: ``DecLockRefParams(uuid, {SWA: [ids]})`` without spans is enough, after a split too."""
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    node, receipt = desk.lock("abcdefgh")
    desk.match("abcdef")
    by_hand = DecLockRefParams(receipt.swa_uuid_for_lock, {SWA: []})
    desk.cache.dec_lock_ref(node, by_hand)
    assert desk.sums() == (8, 0, 8, 0)
    desk.sound()


def test_component_level_calls() -> None:
    """CONTRACT 7: a lock nobody recorded is released by walking: skip the listed ids, stop at the boundary id."""
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    swa = desk.cache.components[SWA]
    lower, upper = desk.node("abcdefgh"), desk.node("abcd")
    result = swa.acquire_component_lock(lower, IncLockRefResult())
    assert (lower.component_data[SWA].lock_ref, upper.component_data[SWA].lock_ref) == (1, 0)
    swa.release_component_lock(lower, result.to_dec_params())
    assert lower.component_data[SWA].lock_ref == 0
    for node in (lower, upper):
        desk.cache.accounts.change_lock(node, SWA, 1)
    lower.component_data[SWA].metadata[UUID] = 77
    swa.release_component_lock(lower, DecLockRefParams(77, {SWA: []}))
    assert (lower.component_data[SWA].lock_ref, upper.component_data[SWA].lock_ref) == (0, 1)
    swa.release_component_lock(lower, DecLockRefParams(None, {SWA: [lower.id]}))
    assert upper.component_data[SWA].lock_ref == 0


def test_a_lock_taken_by_hand_on_full_counts() -> None:
    """Tests write ``lock_ref``: a node locked that way keeps its FULL slots when it is healed."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    node = desk.node("abcd")
    node.component_data[FULL].lock_ref = 1
    desk.tombstone("abcd")
    desk.insert("abcd")
    assert desk.match("abcd") == [1, 2, 3, 4] and desk.mapped(1, 2, 3, 4) == [5, 6, 7, 8]
    node.component_data[FULL].lock_ref -= 1
    assert not node.full_data.locked


def test_full_locks_show_on_the_whole_path() -> None:
    """Visible ``lock_ref`` is the number of locks on or below a node; taking one costs the newly locked nodes."""
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    desk.insert("abcdmnop")
    held = [desk.lock(x) for x in ("abcdefgh", "abcdmnop", "abcd", "abcdmnop")]
    seen = [desk.node(x).component_data[FULL].lock_ref for x in ("abcd", "abcdefgh", "abcdmnop")]
    assert seen == [4, 1, 2]
    assert desk.cache.root_node.component_data[FULL].lock_ref == 1
    for node, receipt in held[:2]:
        desk.cache.dec_lock_ref(node, receipt)
    assert [desk.node(x).component_data[FULL].lock_ref for x in ("abcd", "abcdefgh", "abcdmnop")] == [2, 0, 1]
    assert desk.sums()[:2] == (4, 8)


@pytest.mark.parametrize("between", ["nothing", "another insert"])
def test_the_last_unlock_removes_a_leaf_nothing_can_match(between: str) -> None:
    """Fault 9, rule 8: D22 leaves a tombstone leaf under a FULL lock; its FULL slots return at the unlock, with its parents'."""
    desk = Desk(1, 4)
    mine = desk.alloc(8)
    desk.allocator.free_swa(mine[:4], dp_rank=0)
    desk.insert("abcdefgh", mine, cursor=4)
    node, receipt = desk.lock("abcdefgh")
    desk.tombstone("abcdefgh")
    assert desk.picture() == ["/abcd T", "abcd/efgh T"]
    if between == "another insert":
        desk.insert("mnop")
    desk.cache.dec_lock_ref(node, receipt)
    assert desk.picture() == ([] if between == "nothing" else ["/mnop S"])
    desk.evict(full=64)
    assert desk.available() == (64, 64)
    desk.sound()


def test_nodes_that_left_the_tree_cannot_be_locked_or_released() -> None:
    """D34: after an eviction or a reset a stale node is refused by name."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    node, receipt = desk.lock("abcd")
    desk.cache.reset()
    desk.allocator.clear()
    with pytest.raises(LockReceiptError, match="not in the tree any more"):
        desk.cache.dec_lock_ref(node, receipt)
    with pytest.raises(TreeInvariantError, match="match again before locking"):
        desk.cache.inc_lock_ref(node)
    assert desk.sums() == (0, 0, 0, 0)


def test_the_root_needs_no_lock() -> None:
    desk = Desk(1, 4)
    result = desk.cache.inc_lock_ref(desk.cache.root_node)
    assert (result.delta, result.swa_uuid_for_lock, result.skip_lock_node_ids) == (0, None, {SWA: []})
    assert desk.cache.dec_lock_ref(desk.cache.root_node, result.to_dec_params()) == 0
    assert [d.lock_ref for d in desk.cache.root_node.component_data] == [1, 1, 0]


def test_a_wrong_release_changes_neither_component() -> None:
    """A lock that only SWA holds cannot be released through the cache: refused before SWA lets go."""
    desk = Desk(1, 4)
    desk.insert("abcdefgh")
    node = desk.node("abcdefgh")
    receipt = desk.cache.components[SWA].acquire_component_lock(node, IncLockRefResult()).to_dec_params()
    with pytest.raises(LockReceiptError, match="no FULL lock ends at node"):
        desk.cache.dec_lock_ref(node, receipt)
    assert desk.sums() == (8, 0, 4, 4)
    desk.sound()


def test_a_hand_built_node_can_be_locked() -> None:
    """Tests of the seam link nodes by hand; such a node has no cached end and no observer."""
    desk = Desk(1, 4)
    desk.insert("abcd")
    node = UnifiedTreeNode((FULL, SWA))
    node.key, node.parent = desk.key("ef"), desk.node("abcd")
    node.component_data[FULL].value = node.component_data[SWA].value = desk.slots(9, 10)
    node.parent.children[desk.cache.get_child_key_fn(node.key)] = node
    assert (node.path_len(), node.start) == (6, 4)
    result = desk.cache.inc_lock_ref(node)
    assert (result.delta, result.swa_spans) == (-6, ((0, 6),))
    desk.cache.dec_lock_ref(node, result.to_dec_params())
    assert node.component_data[FULL].lock_ref == 0
