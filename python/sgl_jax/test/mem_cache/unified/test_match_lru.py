"""RFC-0035 section 4: what a match accepts, what it refreshes, and in which order things are evicted."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_jax.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.unified_cache_components import LRURefreshPhase
from sgl_jax.test.mem_cache.unified.desk import FULL, GEOMETRY, GEOMETRY_IDS, SWA, Desk

geometry = pytest.mark.parametrize(("page", "dp"), GEOMETRY, ids=GEOMETRY_IDS)


def age(node: Any) -> float:
    return node.component_data[SWA].metadata["last_access_time"]  # type: ignore[no-any-return]


def set_age(node: Any, value: float) -> None:
    node.component_data[SWA].metadata["last_access_time"] = value


@geometry
def test_a_tombstone_restarts_the_live_counter(page: int, dp: int) -> None:
    """D09: 3 live, 2 tombstone, 3 live with W = 4 pages → only the first 3, live from the root."""
    desk = Desk(page, 4 * page, dp)
    desk.insert("abc")
    desk.insert("abcde")
    desk.insert("abcdefgh")
    desk.tombstone("abcde")
    assert desk.picture() == ["/abc S", "abc/de T", "abcde/fgh S"]
    assert desk.match("abcdefgh") == [1, 2, 3]
    assert desk.match("abcdefgh", full_only=True) == [1, 2, 3, 7, 8, 14, 15, 16]


@geometry
def test_a_deeper_valid_node_wins_over_a_tombstone(page: int, dp: int) -> None:
    """CONTRACT 8: an auxiliary miss disqualifies that node only; FULL stays contiguous through it."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("abcdef")
    desk.tombstone("abcd")
    assert desk.match("abcdef") == [1, 2, 3, 4, 5, 6]
    assert desk.match("abcde") == [1, 2]
    assert desk.match("abcd") == [1, 2]


@pytest.mark.parametrize(
    ("page", "window", "pages"), [(1, 4, 12), (128, 128, 4), (128, 100, 4), (256, 128, 4), (16, 40, 8)]
)
def test_the_same_prompt_of_whole_pages_hits_all_but_one_page(page: int, window: int, pages: int) -> None:
    """D13: look-ups stop at N-1, hence at N-P; a window before it is live, also when P > W."""
    desk = Desk(page, window)
    letters = "abcdefghijkl"[:pages]
    desk.cache.cache_finished_req(desk.request(letters))
    assert desk.match(letters, drop=1) == list(range(1, pages))


@geometry
def test_a_look_up_below_one_page_changes_nothing(page: int, dp: int) -> None:
    """D10: the key is aligned before descending; no empty node can exist."""
    desk = Desk(page, 2 * page, dp)
    desk.insert("a")
    result = desk.cache.match_prefix(MatchPrefixParams(desk.key("a", drop=1)))
    assert result.device_indices.tolist() == [] and result.last_device_node is desk.cache.root_node
    assert desk.picture() == ["/a S"]
    desk.sound()


@geometry
def test_a_partial_node_is_cut_at_a_page(page: int, dp: int) -> None:
    desk = Desk(page, 4 * page, dp)
    desk.insert("abcd")
    node = desk.node("abcd")
    assert desk.match("abxy") == [1, 2]
    assert desk.picture() == ["/ab S", "ab/cd S"]
    assert desk.node("abcd") is node
    assert (desk.node("ab").end, node.start, node.end) == (2 * page, 2 * page, 4 * page)
    desk.sound()


def test_namespaces_do_not_share() -> None:
    """An extra key or another rank is another prefix, even with equal tokens and equal slots (D49)."""
    desk = Desk(4, 4, dp=2)
    for rank in (0, 1):
        desk.rank = rank
        desk.insert("ab")
        assert desk.match("ab") == [1, 2]
    tokens = desk.key("ab").token_ids
    other = desk.cache.match_prefix(MatchPrefixParams(RadixKey(tokens, "lora", 1)))
    assert other.device_indices.tolist() == []
    desk.rank = 0
    assert desk.evict(full=2) == (2, 2)
    assert desk.match("ab") == []
    desk.rank = 1
    assert desk.match("ab") == [1, 2]
    desk.sound()


def test_a_key_without_rank_is_refused_on_two_ranks() -> None:
    """Fault 7: never silently rank 0."""
    desk = Desk(1, 4, dp=2)
    with pytest.raises(ValueError, match="dp_rank"):
        desk.cache.match_prefix(MatchPrefixParams(RadixKey([1, 2])))
    node = desk.cache.tree.attach_leaf(desk.cache.root_node, RadixKey([1]))
    with pytest.raises(ValueError, match="dp_rank"):
        desk.cache.components[SWA].rank_of(node)


def test_refresh_covers_window_plus_page_of_logical_tokens() -> None:
    """DECISIONS 2: P=2, W=4 and nodes of 4 tokens: the endpoint and one more are stamped, the endpoint youngest."""
    desk = Desk(2, 4)
    desk.insert("abcdef")
    a, b, c = desk.node("ab"), desk.node("abcd"), desk.node("abcdef")
    for node in (a, b, c):
        set_age(node, 1.0)
    swa = desk.cache.components[SWA]
    swa.refresh_lru(LRURefreshPhase.WALKDOWN, c, desk.cache.root_node)
    assert [age(n) for n in (a, b, c)] == [1.0, 1.0, 1.0]
    swa.refresh_lru(LRURefreshPhase.MATCH_END, c, desk.cache.root_node)
    assert age(a) == 1.0 and 1.0 < age(b) < age(c)
    set_age(b, 1.0)
    set_age(c, 1.0)
    swa.refresh_lru(LRURefreshPhase.MATCH_END, b, desk.cache.root_node)
    assert age(c) == 1.0 and 1.0 < age(a) < age(b)


def test_tombstones_use_up_the_refresh_budget() -> None:
    desk = Desk(2, 4)
    desk.insert("abcdef")
    a, b, c = desk.node("ab"), desk.node("abcd"), desk.node("abcdef")
    desk.tombstone("abcd")
    for node in (a, b, c):
        set_age(node, 1.0)
    desk.cache.components[SWA].refresh_lru(LRURefreshPhase.INSERT_END, c, desk.cache.root_node)
    assert (age(a), age(b)) == (1.0, 1.0) and age(c) > 1.0


def test_ages_set_by_hand_decide_the_swa_order() -> None:
    """CONTRACT 7: metadata["last_access_time"] is the order, whatever the FULL order says."""
    desk = Desk(1, 4)
    for letters in ("abcd", "efgh", "ijkl"):
        desk.insert(letters)
    for letters, value in (("abcd", 3.0), ("efgh", 1.0), ("ijkl", 2.0)):
        set_age(desk.node(letters), value)
    order = []
    while desk.sums()[2]:
        before = set(desk.picture())
        desk.evict(swa=1)
        order += sorted(before - set(desk.picture()))
    assert order == ["/efgh S", "/ijkl S", "/abcd S"]


def test_ages_set_by_hand_decide_the_full_order() -> None:
    desk = Desk(1, 4)
    for letters in ("abcd", "efgh", "ijkl"):
        desk.insert(letters)
    for letters, value in (("abcd", 3.0), ("efgh", 1.0), ("ijkl", 2.0)):
        desk.node(letters).last_access_time = value
    assert desk.evict(full=1) == (4, 4) and desk.picture() == ["/abcd S", "/ijkl S"]
    assert desk.evict(full=1) == (4, 4) and desk.picture() == ["/abcd S"]


def test_after_a_split_the_matched_part_is_recent_and_the_rest_keeps_its_age() -> None:
    """D84: insert 8; touch others; match 4; then one leaf-sized eviction takes the unmatched rest."""
    desk = Desk(1, 8)
    desk.insert("abcdefgh")
    desk.insert("mnop")
    rest = desk.node("abcdefgh")
    old = rest.last_access_time
    assert desk.match("abcdxx") == [1, 2, 3, 4]
    assert rest.last_access_time == old < desk.node("mnop").last_access_time
    assert desk.node("abcd").last_access_time > desk.node("mnop").last_access_time
    assert desk.evict(full=1) == (4, 4)
    assert desk.picture() == ["/abcd S", "/mnop S"]


def test_a_parent_is_as_young_as_the_youngest_child_it_lost() -> None:
    """A use of a leaf was a use of its path: when the leaf goes the parent does not look ancient."""
    desk = Desk(1, 8)
    desk.insert("ab")
    desk.insert("mn")
    desk.insert("abcd")
    desk.evict(full=1)
    assert desk.picture() == ["/ab S", "ab/cd S"]
    desk.evict(full=1)
    assert desk.picture() == ["/ab S"]
    assert desk.node("ab").last_access_time > 0


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, SWA)], ids=["full", "full+swa"])
def test_the_full_order_is_the_same_with_and_without_swa(kinds: tuple[Any, ...]) -> None:
    """D25, RFC 3: SWA has its own timestamps and leaves FULL's order alone."""
    desk = Desk(1, 4, kinds=kinds)
    for letters in ("abcdefgh", "ijklmnop", "abcdqrst", "uvwx"):
        desk.insert(letters)
    desk.match("ijkl")
    desk.match("abcdefgh")
    order = []
    while desk.sums()[0]:
        before = {p[:-2] for p in desk.picture()}
        desk.evict(full=1)
        order += [p.split("/")[1] for p in before - {p[:-2] for p in desk.picture()}]
    assert order == ["mnop", "qrst", "uvwx", "ijkl", "efgh", "abcd"]


def test_values_outside_every_refreshed_window_go_first() -> None:
    """D26, D25: the far end of a long branch goes before anybody's trailing window, old or new."""
    desk = Desk(1, 4)
    desk.insert("mnop")
    desk.insert("abcdefghijklabcdefgh")
    for expected in ("/abcd", "abcd/efgh", "abcdefgh/ijkl"):
        assert desk.evict(swa=1) == (0, 4)
        assert f"{expected} T" in desk.picture()
    assert desk.match("abcdefghijklabcdefgh") == list(range(5, 25))
    assert desk.evict(swa=1) == (4, 4)
    assert "/mnop S" not in desk.picture()


def test_hot_branches_do_not_keep_their_far_end_alive() -> None:
    """D25: matching X again and again refreshes W + P of it, no more."""
    desk = Desk(1, 4)
    desk.insert("abcdefghijklmnop")
    desk.insert("uvwx")
    for _ in range(3):
        desk.match("abcdefghijklmnop")
    assert desk.evict(swa=4) == (0, 4) and desk.evict(swa=4) == (0, 4)
    assert desk.picture() == ["/abcd T", "/uvwx S", "abcd/efgh T", "abcdefgh/ijkl S", "abcdefghijkl/mnop S"]
