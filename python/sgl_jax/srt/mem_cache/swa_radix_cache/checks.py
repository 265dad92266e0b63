"""Invariants and the picture of the legacy hybrid tree."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.errors import Violation
from sgl_jax.srt.mem_cache.swa_radix_cache.node import SWATreeNode
from sgl_jax.srt.mem_cache.swa_radix_cache.tree import SWARadixTree


def _node_structure(node: SWATreeNode, tree: SWARadixTree) -> list[str]:
    parent, wrong = node.parent, []
    size = len(node.value)
    if not size or len(node.key) != size or size % tree.page_size:
        wrong.append(f"key {len(node.key)}, value {size} tokens at page {tree.page_size}")
    if parent is None or parent.children.get(tree.child_key(node.key)) is not node:
        wrong.append("its parent does not list it")
    elif node.end != parent.end + size:
        wrong.append(f"ends at {node.end}, its parent at {parent.end}")
    elif parent is not tree.root and node.full_lock_ref > parent.full_lock_ref:
        wrong.append(f"FULL lock {node.full_lock_ref} above its parent's {parent.full_lock_ref}")
    if node.swa_lock_ref > node.full_lock_ref:
        wrong.append(f"SWA lock {node.swa_lock_ref} above FULL lock {node.full_lock_ref}")
    if node.swa_tombstone and node.swa_lock_ref:
        wrong.append(f"a tombstone holds {node.swa_lock_ref} SWA locks")
    if node.swa_tombstone and not node.children and not node.full_lock_ref:
        wrong.append("an unlocked tombstone leaf keeps FULL slots nothing can match")
    return wrong


def _candidates(node: SWATreeNode, tree: SWARadixTree) -> list[str]:
    wrong = []
    leaf = not node.children and not node.full_lock_ref and not node.swa_tombstone
    if leaf != (node in tree.full_leaves.get(node.rank, ())):
        wrong.append(f"FULL eviction candidate: {not leaf}, expected {leaf}")
    live = not node.swa_lock_ref and not node.swa_tombstone
    if live != (node in tree.swa_nodes.get(node.rank, ())):
        wrong.append(f"SWA eviction candidate: {not live}, expected {live}")
    return wrong


def _mapping(node: SWATreeNode, allocator: Any) -> str | None:
    mapping = allocator.full_to_swa_index_mapping
    mapping = mapping[node.rank] if isinstance(mapping, list) else mapping
    mapped = int(np.count_nonzero(mapping[node.value]))
    expected = 0 if node.swa_tombstone else len(node.value)
    return (
        None if mapped == expected else f"{mapped} of {len(node.value)} slots are mapped, expected {expected}"
    )


def check_tree(tree: SWARadixTree, allocator: Any | None) -> list[Violation]:
    """Every broken invariant; ``allocator`` None leaves the mapping out."""
    found: list[Violation] = []
    sums: dict[str, Counter[int]] = {
        name: Counter() for name in ("full_evictable", "full_protected", "swa_evictable", "swa_protected")
    }
    for node in tree.nodes():
        size = len(node.value)
        sums["full_protected" if node.full_lock_ref else "full_evictable"][node.rank] += size
        if not node.swa_tombstone:
            sums["swa_protected" if node.swa_lock_ref else "swa_evictable"][node.rank] += size
        wrong = _node_structure(node, tree) + _candidates(node, tree)
        unmapped = _mapping(node, allocator) if allocator is not None else None
        found += [
            Violation("tree_structure", node.rank, "", f"node {node.id}: {w}", (node.id,)) for w in wrong
        ]
        if unmapped:
            found.append(
                Violation("node_mapping", node.rank, "swa", f"node {node.id}: {unmapped}", (node.id,))
            )
    for name, walked in sums.items():
        kept: dict[int, int] = getattr(tree, name)
        for rank in sorted({*walked, *kept}):
            if walked[rank] != kept.get(rank, 0):
                detail = f"{name} counter {kept.get(rank, 0)}, nodes {walked[rank]}"
                found.append(Violation(f"{name}_counter", rank, name[: name.index("_")], detail))
    return found


def print_tree(tree: SWARadixTree) -> str:
    """One node a line: depth, id, key preview, interval, live or tombstone, locks, window boundary."""
    lines: list[str] = []
    stack = [(child, 0) for child in tree.root.children.values()]
    while stack:
        node, depth = stack.pop()
        state = "tombstone" if node.swa_tombstone else "live"
        lines.append(
            f"{'  ' * depth}#{node.id} [{node.end - len(node.value)}, {node.end}) {state} {node.key!r} "
            f"full_lock={node.full_lock_ref} swa_lock={node.swa_lock_ref} uuid={node.swa_uuid}"
        )
        stack.extend((child, depth + 1) for child in node.children.values())
    totals = [f"full {sum(tree.full_evictable.values())}+{sum(tree.full_protected.values())}"]
    totals.append(f"swa {sum(tree.swa_evictable.values())}+{sum(tree.swa_protected.values())}")
    return "\n".join([*lines, "evictable+protected: " + ", ".join(totals)])
