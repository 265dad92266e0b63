"""All pools of a model under their names, so that a step replaces their donated buffers in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MemoryPools:
    """``MemoryPools(token_to_kv_pool=pool, ...)``; pools are attributes and keep their order of construction."""

    def __init__(self, **pools: Any) -> None:
        self._names = tuple(pools)
        for name, pool in pools.items():
            setattr(self, name, pool)

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are no pool.
        raise AttributeError(
            f"no memory pool named {name!r}; there are {list(self.__dict__.get('_names', ()))}"
        )

    def items(self) -> list[tuple[str, Any]]:
        """(name, pool) in construction order."""
        return [(name, getattr(self, name)) for name in self._names]

    def buffers(self) -> dict[str, Any]:
        """Name -> buffers to donate."""
        return {name: pool.buffers() for name, pool in self.items()}

    def replace_all(self, updates: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Give every named pool the buffers a step returned. Raises ValueError, before any change, for an unknown name."""
        replacements = {**(updates or {}), **named}
        unknown = sorted(set(replacements) - set(self._names))
        if unknown:
            raise ValueError(f"no memory pool named {unknown}; there are {list(self._names)}")
        for name, buffers in replacements.items():
            getattr(self, name).replace_buffer(buffers)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple(pool for _, pool in self.items()), self._names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: tuple[Any, ...]) -> MemoryPools:
        return cls(**dict(zip(names, children, strict=True)))
