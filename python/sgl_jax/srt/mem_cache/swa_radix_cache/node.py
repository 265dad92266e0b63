"""Node of the legacy hybrid tree, and the slots a tree operation surrendered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from sgl_jax.srt.mem_cache.base_prefix_cache import IntArray
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.srt.mem_cache.radix_tree.node_ids import NumberedNodes

next_swa_uuid: Callable[[], int] = count(1).__next__
next_stamp: Callable[[], int] = count(1).__next__


class SWATreeNode(metaclass=NumberedNodes):
    """One edge and its end. ``value`` holds the FULL slots of ``key``; the SWA slots are their mapped peers.

    ``swa_tombstone``: the SWA half is gone, the FULL half is not. ``swa_uuid`` names the node where a window lock ended.
    ``end`` is the number of tokens from the root to this node's end; a split leaves it true.
    """

    __slots__ = (
        "children",
        "end",
        "full_lock_ref",
        "hit_count",
        "id",
        "key",
        "last_access_time",
        "parent",
        "swa_last_access_time",
        "swa_lock_ref",
        "swa_tombstone",
        "swa_uuid",
        "value",
    )

    def __init__(self, id: int | None = None) -> None:
        self.children: dict[Any, SWATreeNode] = {}
        self.parent: SWATreeNode | None = None
        self.key: RadixKey = RadixKey([])
        self.value: IntArray = np.empty((0,), np.int32)
        self.end = 0
        self.swa_tombstone = False
        self.full_lock_ref = 0
        self.swa_lock_ref = 0
        self.swa_uuid: int | None = None
        self.last_access_time = next_stamp()
        self.swa_last_access_time = self.last_access_time
        self.hit_count = 0
        self.id = SWATreeNode.take_id(id)

    def __lt__(self, other: SWATreeNode) -> bool:
        return self.last_access_time < other.last_access_time

    @property
    def rank(self) -> int:
        return self.key.dp_rank or 0


class OpRecord(NamedTuple):
    """One operation for crash bundles: ``asked`` and ``got`` are token counts."""

    op: str
    rank: int
    rid: str
    asked: int
    got: int


@dataclass(slots=True)
class Surrendered:
    """FULL indices a tree operation gave up, by what happens to them. The cache applies them, in this order:

    ``swa``: only the SWA peers are freed · ``moves``: (source, target), the SWA peers of source go to target and source's
    FULL slots are freed · ``full``: only FULL is freed (a tombstone's old value) · ``both``: both halves are freed.
    """

    swa: list[IntArray] = field(default_factory=list)
    moves: list[tuple[IntArray, IntArray]] = field(default_factory=list)
    full: list[IntArray] = field(default_factory=list)
    both: list[IntArray] = field(default_factory=list)
