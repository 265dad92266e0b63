"""Construction rules of the unified cache: which components exist, and parameters that agree with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.unified_cache_components.component_types import ComponentType
from sgl_jax.srt.mem_cache.unified_cache_components.full_component import FullComponent
from sgl_jax.srt.mem_cache.unified_cache_components.swa_component import SWAComponent
from sgl_jax.srt.mem_cache.unified_cache_components.tree_component import TreeComponent

COMPONENT_REGISTRY: dict[ComponentType, type[TreeComponent]] = {
    ComponentType.FULL: FullComponent,
    ComponentType.SWA: SWAComponent,
}


def int_attribute(owner: Any, name: str, default: int) -> int:
    """An int attribute, or the default when it is missing or no int (a mocked allocator)."""
    value = getattr(owner, name, default)
    return value if isinstance(value, int) else default


def component_order(kinds: Sequence[ComponentType]) -> tuple[ComponentType, ...]:
    """The components in hook order, FULL first.

    Raises ValueError when FULL is missing or a component is asked for that this version does not have.
    """
    wanted = sorted({ComponentType(kind) for kind in kinds})
    for kind in wanted:
        if kind not in COMPONENT_REGISTRY:
            have = ", ".join(k.name for k in COMPONENT_REGISTRY)
            raise ValueError(
                f"tree_components: ComponentType.{kind.name} is not available in this version; choose from {have}"
            )
    if ComponentType.FULL not in wanted:
        raise ValueError(
            "tree_components must contain ComponentType.FULL: it is the base value of every node"
        )
    return tuple(wanted)


def resolve_init_params(
    given: CacheInitParams | None, own: CacheInitParams, kinds: tuple[ComponentType, ...]
) -> CacheInitParams:
    """``given`` after comparing it with the cache's ``own`` arguments, or ``own`` when nothing was given.

    Raises ValueError naming every field that differs, for pages finer than the allocator's, and for SWA without a window.
    """
    if own.page_size < 1:
        raise ValueError(f"page_size={own.page_size} must be at least 1")
    granule = int_attribute(own.token_to_kv_pool_allocator, "page_size", 1)
    if own.page_size % granule:
        raise ValueError(
            f"page_size={own.page_size} is no multiple of the allocator's page_size={granule}: nodes would share pages; "
            f"give the cache the allocator's page size"
        )
    params = own if given is None else given
    if given is not None:
        for name in ("req_to_token_pool", "token_to_kv_pool_allocator"):
            if getattr(given, name) is not getattr(own, name):
                raise ValueError(
                    f"component_init_params.{name} is not the object the cache was given: pools are shared"
                )
        for name in ("page_size", "is_eagle", "enable_recurrent_extra_buffer", "recurrent_track_interval"):
            if getattr(given, name) != getattr(own, name):
                raise ValueError(
                    f"component_init_params.{name}={getattr(given, name)!r}, but the cache was given {getattr(own, name)!r}"
                )
    if ComponentType.SWA in kinds and params.sliding_window_size is None:
        raise ValueError(
            "sliding_window_size is None: a tree with SWA needs the model's window in component_init_params"
        )
    return params
