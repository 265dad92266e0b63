"""Vocabulary of the unified tree: component kinds, phases and what one component keeps on one node."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from enum import IntEnum, IntFlag, StrEnum
from typing import Any

from sgl_jax.srt.mem_cache.radix_tree.lru import get_and_increase_time_counter

UUID_KEY = "component_uuid"
AGE_KEY = "last_access_time"
_FIELDS = {AGE_KEY: "age", UUID_KEY: "boundary"}

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


class ComponentData:
    """What one component keeps on one node.

    ``value`` is int32 [node length] of the component's pool, or None (FULL: not on the device; SWA: tombstone).
    ``lock_ref`` counts the locks that protect the value. ``age`` is its place among the eviction candidates of an auxiliary
    component, ``boundary`` the id of the locks that end here; None: not set. ``node`` and ``component`` say whose data these
    are, while the node is in a tree made of that component. ``metadata`` shows age and boundary under the seam's names.
    """

    __slots__ = (
        "age",
        "boundary",
        "component",
        "host_lock_ref",
        "host_value",
        "lock_ref",
        "node",
        "other_metadata",
        "value",
    )

    def __init__(
        self,
        value: Any = None,
        lock_ref: int = 0,
        host_value: Any = None,
        host_lock_ref: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.value = value
        self.lock_ref = lock_ref
        self.host_value = host_value
        self.host_lock_ref = host_lock_ref
        self.age: float | None = None
        self.boundary: int | None = None
        self.node: Any = None
        self.component: ComponentType | None = None
        self.other_metadata: dict[str, Any] | None = None
        if metadata:
            self.metadata.update(metadata)

    @property
    def metadata(self) -> MutableMapping[str, Any]:
        """Node-local, never shared."""
        return NodeMetadata(self)


class NodeMetadata(MutableMapping[str, Any]):
    """View of a :class:`ComponentData`; assigning the age re-files the node among the eviction candidates."""

    __slots__ = ("_data",)

    def __init__(self, data: ComponentData) -> None:
        self._data = data

    def _as_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self._data, field) for name, field in _FIELDS.items()}
        return {k: v for k, v in fields.items() if v is not None} | (self._data.other_metadata or {})

    def __getitem__(self, name: str) -> Any:
        return self._as_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._as_dict())

    def __len__(self) -> int:
        return len(self._as_dict())

    def __setitem__(self, name: str, value: Any) -> None:
        data = self._data
        if name not in _FIELDS:
            data.other_metadata = {**(data.other_metadata or {}), name: value}
            return
        setattr(data, _FIELDS[name], value)
        if name == AGE_KEY and data.node is not None and data.node.observer is not None:
            data.node.observer(data.node, data.component)

    def __delitem__(self, name: str) -> None:
        rest = self._as_dict()
        del rest[name]
        if name in _FIELDS:
            setattr(self._data, _FIELDS[name], None)
        else:
            self._data.other_metadata = {k: v for k, v in rest.items() if k not in _FIELDS}


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
