"""Invariants of the unified tree as a list of typed violations; reads everything, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.errors import Violation
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.unified_radix_cache.cache import UnifiedRadixCache

IntArray = npt.NDArray[np.int32]
FULL, SWA = ComponentType.FULL, ComponentType.SWA
_SHOWN = 16


def check_cache(cache: UnifiedRadixCache) -> list[Violation]:
    """Structure, lengths, sums, candidates, locks, mapping and slot uniqueness of every rank."""
    nodes = list(cache.tree.nodes())
    out = [v for node in nodes for v in _check_node(cache, node)]
    out += _check_sums(cache, nodes)
    out += _check_candidates(cache, nodes)
    for component in cache._components_tuple:
        out += component.check_nodes(nodes)
    for rank in sorted({node.rank for node in nodes}):
        mine = [node for node in nodes if node.rank == rank]
        out += _check_unique(mine, FULL, rank)
        if cache.has_swa:
            out += _check_unique(mine, SWA, rank)
            out += _check_mapping(cache, mine, rank)
    return out


def _check_node(cache: UnifiedRadixCache, node: UnifiedTreeNode) -> Iterator[Violation]:
    def bad(kind: str, detail: str) -> Violation:
        return Violation(kind, node.rank, "", f"node {node.id}: {detail}", (node.id,))

    size = len(node.key)
    if size == 0 or size % cache.page_size:
        yield bad("node_length", f"{size} tokens at page size {cache.page_size}")
    if node.parent is None or node.parent.children.get(cache.tree.child_key(node.key)) is not node:
        yield bad("node_link", "its parent does not know it under its own key")
    elif node.end != node.parent.path_len() + size:
        yield bad("node_end", f"end {node.end}, parent ends at {node.parent.path_len()}, {size} tokens")
    for ct in cache.tree_components:
        value = node.component_data[ct].value
        if value is not None and len(value) != size:
            yield bad("value_length", f"{ct} value of {len(value)} slots for {size} tokens")
    data = node.full_data
    below = sum(1 for child in node.children.values() if child.full_data.locked)
    if data.own < 0 or data.below != below:
        yield bad("full_lock_count", f"own {data.own}, locked children {data.below}, counted {below}")
    if data.value is None and data.host_value is None:
        yield bad("full_missing", "neither a device nor a host value")


def _check_sums(cache: UnifiedRadixCache, nodes: Sequence[UnifiedTreeNode]) -> Iterator[Violation]:
    for ct in cache.tree_components:
        evictable: dict[int, int] = {}
        protected: dict[int, int] = {}
        for node in nodes:
            data = node.component_data[ct]
            locked = node.full_data.locked if ct is FULL else data.lock_ref > 0
            bucket = protected if locked else evictable
            bucket[node.rank] = bucket.get(node.rank, 0) + (0 if data.value is None else len(data.value))
        for name, counted, kept in (
            ("evictable", evictable, cache.accounts.evictable[ct]),
            ("protected", protected, cache.accounts.protected[ct]),
        ):
            for rank in set(counted) | set(kept):
                if counted.get(rank, 0) != kept.get(rank, 0):
                    detail = f"{name} counter {kept.get(rank, 0)}, nodes sum to {counted.get(rank, 0)}"
                    yield Violation(f"{name}_sum", rank, str(ct), detail)


def _check_candidates(cache: UnifiedRadixCache, nodes: Sequence[UnifiedTreeNode]) -> Iterator[Violation]:
    accounts = cache.accounts
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
    filed = sum(len(index) for index in accounts.leaves.values())
    leaves = sum(1 for node in nodes if accounts.is_leaf(node))
    if filed != leaves:
        yield Violation("leaf_index", 0, "full", f"{filed} leaves filed, {leaves} in the tree")


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
