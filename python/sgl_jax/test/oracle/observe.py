"""Reads the public structure of the implementation: nodes of the tree, free pages and mapping of the allocator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

FULL, SWA = 0, 1


@dataclass(slots=True)
class NodeView:
    """One node as the seam shows it (``key``, ``component_data``, ``children``)."""

    node: Any
    parent: NodeView | None
    start: int
    tokens: list[int]
    full: list[int]
    swa: list[int] | None
    full_lock: int
    swa_lock: int
    children: list[NodeView] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def _view(node: Any, parent: NodeView | None) -> NodeView:
    full, swa = node.component_data[FULL], node.component_data[SWA]
    return NodeView(
        node=node,
        parent=parent,
        start=parent.end if parent else 0,
        tokens=node.key.token_ids,
        full=np.asarray(full.value).tolist(),
        swa=None if swa.value is None else np.asarray(swa.value).tolist(),
        full_lock=full.lock_ref,
        swa_lock=swa.lock_ref,
    )


def walk(cache: Any) -> list[NodeView]:
    """Every node below the root, parents first. Also checks the parent links."""
    out: list[NodeView] = []
    stack: list[tuple[Any, NodeView | None]] = [(c, None) for c in cache.root_node.children.values()]
    for child, _ in stack:
        assert child.parent is cache.root_node, "child of the root names another parent"
    while stack:
        node, parent = stack.pop()
        view = _view(node, parent)
        if parent is not None:
            parent.children.append(view)
        out.append(view)
        for child in node.children.values():
            assert child.parent is node, f"node {child.id} names another parent"
            stack.append((child, view))
    return out


def free_pages(sub: Any, rank: int, page_size: int) -> list[int]:
    """Free page ids (slots at page size 1) of a sub-allocator, duplicates kept."""
    if page_size == 1:
        return np.asarray(sub.free_slots[rank]).tolist()
    return np.concatenate([sub.free_pages[rank], sub.release_pages[rank]]).tolist()


def mapping_of(allocator: Any, rank: int, dp_size: int) -> np.ndarray:  # type: ignore[type-arg]
    mapping = allocator.full_to_swa_index_mapping
    return mapping if dp_size == 1 else mapping[rank]
