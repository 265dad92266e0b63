"""How much of a matched path a request may use (RFC-0035 section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.unified_cache_components.node import UnifiedTreeNode
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import TreeComponent

IntArray = npt.NDArray[np.int32]


def accept_path(
    path: Sequence[UnifiedTreeNode], full: TreeComponent, others: Sequence[TreeComponent]
) -> tuple[list[IntArray], int]:
    """FULL values of the contiguous part of ``path`` (root down), and how many of them may be used.

    A FULL miss ends the path. An auxiliary miss only disqualifies that node as an end: a deeper valid node may still win.
    The most restrictive component decides (D12).
    """
    full_valid = full.create_match_validator(match_device_only=True)
    validators = [component.create_match_validator() for component in others]
    chunks: list[IntArray] = []
    accepted = 0
    for node in path:
        if not full_valid(node):
            break
        chunks.append(node.full_data.value)
        usable = True
        for valid in validators:  # every validator sees every node: they keep state
            usable = valid(node) and usable
        if usable:
            accepted = len(chunks)
    return chunks, accepted
