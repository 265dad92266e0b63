"""``check()``: each kind of violation is found, named and placed; a sound tree has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.errors import TreeInvariantError
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.mem_cache.unified.desk import FULL, SWA, Desk


def built() -> Desk:
    desk = Desk(2, 4, dp=2)
    desk.insert("abcdef")
    desk.insert("abxy")
    desk.lock("abxy")
    assert desk.cache.check() == []
    return desk


def spoil_counter(desk: Desk) -> None:
    desk.cache.component_evictable_size_[FULL][1] += 2


def spoil_protected(desk: Desk) -> None:
    desk.cache.component_protected_size_[SWA][1] -= 2


def spoil_link(desk: Desk) -> None:
    desk.node("ab").parent.children.clear()
    desk.cache.root_node.children["elsewhere"] = desk.cache.evictable_device_leaves.pop().parent.parent


def spoil_end(desk: Desk) -> None:
    desk.node("abcdef").end = 11


def spoil_length(desk: Desk) -> None:
    data = desk.node("abcdef").component_data[FULL]
    data.value = data.value[:1]


def spoil_full_lock(desk: Desk) -> None:
    desk.node("ab").full_data.below = 2


def spoil_swa_lock(desk: Desk) -> None:
    desk.cache.accounts.change_lock(desk.node("abcdef"), SWA, 1)


def spoil_mapping(desk: Desk) -> None:
    desk.allocator.full_to_swa_index_mapping[1][2] = 9


def spoil_tombstone_mapping(desk: Desk) -> None:
    desk.tombstone("abcdef")
    desk.allocator.full_to_swa_index_mapping[1][10] = 11


def spoil_owner(desk: Desk) -> None:
    desk.node("abcdef").component_data[FULL].value[:] = desk.node("abcd").component_data[FULL].value


def spoil_slot(desk: Desk) -> None:
    desk.node("abcdef").slot = desk.node("abcd").slot


def spoil_leaf_index(desk: Desk) -> None:
    desk.cache.accounts.leaves[1].discard(desk.node("abcdef"))


def spoil_aux_index(desk: Desk) -> None:
    desk.cache.accounts.aux[SWA][1].discard(desk.node("abcdef"))


def spoil_gone_leaf(desk: Desk) -> None:
    """A node that left the tree stays filed."""
    desk.cache.accounts.leaves[1].add(desk.cache.tree.new_node())


def spoil_barren_index(desk: Desk) -> None:
    """An unlocked tombstone leaf that nobody would remove."""
    desk.tombstone("abcdef")
    desk.cache.accounts.barren_nodes(1)
    desk.cache.accounts._barren[1].clear()


def spoil_value(desk: Desk) -> None:
    desk.node("abcdef").component_data[FULL].value = None


def spoil_limit(desk: Desk) -> None:
    desk.cache.components[SWA]._limit = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (spoil_counter, "evictable_sum"),
        (spoil_protected, "protected_sum"),
        (spoil_link, "node_link"),
        (spoil_slot, "node_slot"),
        (spoil_end, "node_end"),
        (spoil_length, "value_length"),
        (spoil_full_lock, "full_lock_count"),
        (spoil_swa_lock, "swa_lock_count"),
        (spoil_mapping, "mapping_pair"),
        (spoil_tombstone_mapping, "mapping_pair"),
        (spoil_owner, "tree_slot_owner"),
        (spoil_leaf_index, "leaf_index"),
        (spoil_aux_index, "aux_index"),
        (spoil_gone_leaf, "leaf_index"),
        (spoil_barren_index, "barren_index"),
        (spoil_value, "full_missing"),
        (spoil_limit, "swa_node_too_long"),
    ],
)
def test_each_violation_is_found(spoil: Callable[[Desk], Any], kind: str) -> None:
    desk = built()
    spoil(desk)
    found = [v for v in desk.cache.check() if v.kind == kind]
    assert found and all(v.rank == 1 for v in found)
    needs_allocator = {"mapping_pair", "tree_slot_owner"}
    assert bool([v for v in desk.cache.tree.check() if v.kind == kind]) == (kind not in needs_allocator)


def test_a_node_below_a_page_is_reported() -> None:
    desk = built()
    leaf = desk.cache.tree.attach_leaf(desk.cache.root_node, RadixKey([1], None, 1))
    desk.cache.accounts.set_value(leaf, FULL, np.array([60], np.int32))
    assert "node_length" in {v.kind for v in desk.cache.check()}


@pytest.mark.parametrize("cuts", [(0,), (4,), (1,), (2, 2), (6,)])
def test_impossible_cuts_are_refused(cuts: tuple[int, ...]) -> None:
    """D10: no zero-length node, no node off a page boundary."""
    desk = built()
    with pytest.raises(TreeInvariantError, match="cannot be cut"):
        desk.cache.cut_node(desk.node("abcdef"), cuts)
    with pytest.raises(TreeInvariantError):
        desk.cache.cut_node(desk.cache.root_node, ())
    assert desk.cache.check() == []


def test_only_free_leaves_can_be_detached() -> None:
    desk = built()
    for node in (desk.node("ab"), desk.node("abxy"), desk.cache.root_node):
        with pytest.raises(TreeInvariantError, match="cannot be removed"):
            desk.cache.tree.detach_leaf(node)
