"""Invariants of the unified tree as a list of typed violations; reads everything, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.errors import Violation
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.unified_radix_cache.cache import UnifiedRadixCache
    from sgl_jax.srt.mem_cache.unified_radix_cache.tree import PrefixTree

IntArray = npt.NDArray[np.int32]
FULL, SWA = ComponentType.FULL, ComponentType.SWA
_SHOWN = 16


def check_tree(tree: PrefixTree) -> list[Violation]:
    """What the tree knows without an allocator: structure, lengths, sums, candidates and locks of every rank."""
    nodes = list(tree.nodes())
    out = [v for node in nodes for v in _check_node(tree, node)]
    out += _check_sums(tree, nodes)
    out += _check_candidates(tree, nodes)
    for component in tree.components:
        out += component.check_nodes(nodes)
    return out


def check_cache(cache: UnifiedRadixCache) -> list[Violation]:
    """The tree's own violations, then slot uniqueness and mapping of every rank."""
    out = cache.tree.check()
    nodes = list(cache.tree.nodes())
    for rank in sorted({node.rank for node in nodes}):
        mine = [node for node in nodes if node.rank == rank]
        out += _check_unique(mine, FULL, rank)
        if cache.has_swa:
            out += _check_unique(mine, SWA, rank)
            out += _check_mapping(cache, mine, rank)
    return out


def _check_node(tree: PrefixTree, node: UnifiedTreeNode) -> Iterator[Violation]:
    def bad(kind: str, detail: str) -> Violation:
        return Violation(kind, node.rank, "", f"node {node.id}: {detail}", (node.id,))

    size = len(node.key)
    if size == 0 or size % tree.page_size:
        yield bad("node_length", f"{size} tokens at page size {tree.page_size}")
    slot = tree.child_key(node.key)
    if node.parent is None or node.parent.children.get(slot) is not node:
        yield bad("node_link", "its parent does not know it under its own key")
    elif node.slot not in (None, slot):
        yield bad("node_slot", "it remembers another place than its key's")
    elif node.end != node.parent.path_len() + size:
        yield bad("node_end", f"end {node.end}, parent ends at {node.parent.path_len()}, {size} tokens")
    for ct in tree.kinds:
        value = node.component_data[ct].value
        if value is not None and len(value) != size:
            yield bad("value_length", f"{ct} value of {len(value)} slots for {size} tokens")
    data = node.full_data
    below = sum(1 for child in node.children.values() if child.full_data.locked)
    if data.own < 0 or data.below != below:
        yield bad("full_lock_count", f"own {data.own}, locked children {data.below}, counted {below}")
    if data.value is None and data.host_value is None:
        yield bad("full_missing", "neither a device nor a host value")


def _check_sums(tree: PrefixTree, nodes: Sequence[UnifiedTreeNode]) -> Iterator[Violation]:
    for ct in tree.kinds:
        evictable: dict[int, int] = {}
        protected: dict[int, int] = {}
        for node in nodes:
            data = node.component_data[ct]
            locked = node.full_data.locked if ct is FULL else data.lock_ref > 0
            bucket = protected if locked else evictable
            bucket[node.rank] = bucket.get(node.rank, 0) + (0 if data.value is None else len(data.value))
        for name, counted, kept in (
            ("evictable", evictable, tree.accounts.evictable[ct]),
            ("protected", protected, tree.accounts.protected[ct]),
        ):
            for rank in set(counted) | set(kept):
                if counted.get(rank, 0) != kept.get(rank, 0):
                    detail = f"{name} counter {kept.get(rank, 0)}, nodes sum to {counted.get(rank, 0)}"
                    yield Violation(f"{name}_sum", rank, str(ct), detail)


def _check_candidates(tree: PrefixTree, nodes: Sequence[UnifiedTreeNode]) -> Iterator[Violation]:
    accounts = tree.accounts
    for node in nodes:
        if (node in accounts.leaves[node.rank]) != accounts.is_leaf(node):
            detail = f"node {node.id} is {'' if accounts.is_leaf(node) else 'not '}an evictable leaf, index differs"
            yield Violation("leaf_index", node.rank, "full", detail, (node.id,))
        for ct, indexes in accounts.aux.items():
            data = node.component_data[ct]
            belongs = data.value is not None and data.lock_ref <= 0
            if (node in indexes[node.rank]) != belongs:
                detail = f"node {node.id} belongs to the candidates: {belongs}, index differs"
                yield Violation("aux_index", node.rank, str(ct), detail, (node.id,))
    yield from _check_filed(tree, nodes)


def _check_filed(tree: PrefixTree, nodes: Sequence[UnifiedTreeNode]) -> Iterator[Violation]:
    """Nothing else is filed: no node that left the tree, none twice, and exactly the unmatchable leaves as such."""
    accounts = tree.accounts
    leaves = [node for node in nodes if accounts.is_leaf(node)]
    groups: list[tuple[ComponentType, Mapping[int, Sized], Sequence[UnifiedTreeNode]]]
    groups = [(FULL, accounts.leaves, leaves)]
    for ct, indexes in accounts.aux.items():
        data = [(node, node.component_data[ct]) for node in nodes]
        groups.append((ct, indexes, [n for n, d in data if d.value is not None and d.lock_ref <= 0]))
    for ct, filed, belong in groups:
        counts = Counter(node.rank for node in belong)
        for rank in counts.keys() | filed.keys():
            found = len(filed.get(rank, ()))
            if found != counts[rank]:
                kind = "leaf_index" if ct is FULL else "aux_index"
                detail = f"{found} candidates filed, {counts[rank]} in the tree"
                yield Violation(kind, rank, str(ct), detail)
    for rank in {node.rank for node in nodes}:
        dead = {node.id for node in leaves if node.rank == rank and accounts.is_barren(node)}
        wrong = dead ^ {node.id for node in accounts.barren_nodes(rank)}
        if wrong:
            detail = f"{len(wrong)} leaves differ from what is filed as unmatchable (rule 8)"
            yield Violation("barren_index", rank, "full", detail, tuple(sorted(wrong))[:_SHOWN])


def _values(nodes: Sequence[UnifiedTreeNode], ct: ComponentType) -> IntArray:
    parts = [n.component_data[ct].value for n in nodes if n.component_data[ct].value is not None]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _check_unique(nodes: Sequence[UnifiedTreeNode], ct: ComponentType, rank: int) -> Iterator[Violation]:
    slots, counts = np.unique(_values(nodes, ct), return_counts=True)
    wrong = slots[(counts > 1) | (slots <= 0)]
    if wrong.size:
        detail = f"{wrong.size} slots are owned twice by the tree or are reserved"
        yield Violation("tree_slot_owner", rank, str(ct), detail, tuple(wrong[:_SHOWN].tolist()))


def _check_mapping(
    cache: UnifiedRadixCache, nodes: Sequence[UnifiedTreeNode], rank: int
) -> Iterator[Violation]:
    paired = [n for n in nodes if n.full_data.value is not None]
    dead = [n for n in paired if n.component_data[SWA].value is None]
    live = [n for n in paired if len(n.full_data.value) == len(_values([n], SWA))]
    for group, wanted in ((live, _values(live, SWA)), (dead, None)):
        full = _values(group, FULL)
        if not full.size:
            continue
        mapped = cache.token_to_kv_pool_allocator.translate_full_to_swa(
            full, dp_rank=rank, require_mapped=False
        )
        wrong = full[mapped != (0 if wanted is None else wanted)]
        if wrong.size:
            what = (
                "of tombstones are still mapped" if wanted is None else "map elsewhere than their node says"
            )
            detail = f"{wrong.size} FULL slots {what}"
            yield Violation("mapping_pair", rank, "swa", detail, tuple(wrong[:_SHOWN].tolist()))
