"""Vocabulary of the unified tree: component kinds, phases and what one component keeps on one node."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag, StrEnum
from typing import Any

from sgl_jax.srt.mem_cache.radix_tree.lru import get_and_increase_time_counter

UUID_KEY = "component_uuid"
AGE_KEY = "last_access_time"

_uuids = itertools.count(1)


class ComponentType(IntEnum):
    """A kind of per-token state; also the index into ``component_data``."""

    FULL = 0
    SWA = 1
    RECURRENT = 2

    def __str__(self) -> str:
        return self.name.lower()

    @property
    def is_full(self) -> bool:
        return self is ComponentType.FULL

    @property
    def is_swa(self) -> bool:
        return self is ComponentType.SWA

    @property
    def is_recurrent(self) -> bool:
        return self is ComponentType.RECURRENT


BASE_COMPONENT_TYPE = ComponentType.FULL
_NUM_COMPONENT_TYPES = len(ComponentType)


class EvictLayer(IntFlag):
    """Which tier an eviction or a presence test is about."""

    DEVICE = 1
    HOST = 2
    ALL = 3


class CacheTransferPhase(StrEnum):
    """Steps of a transfer between tiers."""

    BACKUP_HOST = "backup_host"
    LOAD_BACK = "load_back"
    BACKUP_STORAGE = "backup_storage"
    PREFETCH = "prefetch"


class LRURefreshPhase(StrEnum):
    """When recency is refreshed: on every node of a walk, at the end of a match, at the end of an insert."""

    WALKDOWN = "walkdown"
    MATCH_END = "match_end"
    INSERT_END = "insert_end"


@dataclass(slots=True, eq=False)
class ComponentData:
    """What one component keeps on one node.

    ``value`` is int32 [node length] of the component's pool, or None (FULL: not on the device; SWA: tombstone).
    ``lock_ref`` counts the locks that protect the value. ``metadata`` is node-local and never shared.
    """

    value: Any = None
    lock_ref: int = 0
    host_value: Any = None
    host_lock_ref: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


def next_component_uuid() -> int:
    """A fresh lock boundary id."""
    return next(_uuids)


__all__ = [
    "AGE_KEY",
    "BASE_COMPONENT_TYPE",
    "UUID_KEY",
    "_NUM_COMPONENT_TYPES",
    "CacheTransferPhase",
    "ComponentData",
    "ComponentType",
    "EvictLayer",
    "LRURefreshPhase",
    "get_and_increase_time_counter",
    "next_component_uuid",
]
