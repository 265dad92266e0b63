"""Views for people, crash bundles and the ledger. Read-only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType
from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.ledger.source import OwnedNode

SWA = ComponentType.SWA


class OpRecord(NamedTuple):
    """One operation for crash bundles: ``asked`` and ``got`` are token counts."""

    op: str
    rank: int
    rid: str
    asked: int
    got: int


def ledger_nodes(nodes: Iterable[UnifiedTreeNode]) -> Iterator[OwnedNode]:
    """Nodes as the ledger reads them."""
    from sgl_jax.srt.mem_cache.ledger.source import OwnedNode

    for node in nodes:
        swa = node.component_data[SWA]
        yield OwnedNode(node.id, node.full_data.value, swa.value, node.full_data.locked, swa.lock_ref > 0)


def describe_tree(root: UnifiedTreeNode, has_swa: bool) -> str:
    """One line per node, indented by depth: id, rank, positions, S live or T tombstone, locks."""
    lines: list[str] = []
    total = 0
    stack = [(child, 1) for child in root.children.values()]
    while stack:
        node, depth = stack.pop()
        swa = node.component_data[SWA]
        state = "" if not has_swa else (" T" if swa.value is None else " S")
        locks = f" locks full={node.full_data.lock_ref} swa={swa.lock_ref}" if node.in_use else ""
        lines.append(f"{'  ' * depth}{node.id} dp={node.rank} [{node.start},{node.path_len()}){state}{locks}")
        total += len(node.key)
        stack.extend((child, depth + 1) for child in node.children.values())
    return "\n".join([f"root, {total} tokens", *lines])
