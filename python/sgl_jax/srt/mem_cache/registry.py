"""The route table (RFC-0035 section 7): which cache a configuration runs on, decided in one place, first match wins.

::

    configuration                                route               implementation
    hybrid, radix off (flag irrelevant)          swa_chunk           SWAChunkCache
    hybrid, radix on, unified                    unified_swa         UnifiedRadixCache(FULL, SWA)
    hybrid, radix on                             legacy_swa          SWARadixCache (baseline and rollback)
    radix off, chunked prefill                   chunk               ChunkCache
    recurrent, radix on, unified                 unified_recurrent   UnifiedRadixCache(FULL, RECURRENT)
    radix on, unified                            unified_full        UnifiedRadixCache(FULL)
    anything else                                radix               RadixCache (disabled when radix is off)

The new-route predicate is exactly ``hybrid_swa and unified and not disable_radix_cache``; the fail-fast gates in
``kv_cache_builder`` apply to it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sgl_jax.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouteInputs:
    """All a route depends on; nothing else may change it."""

    hybrid_swa: bool
    disable_radix_cache: bool
    unified: bool
    chunked_prefill: bool
    recurrent: bool = False

    @property
    def new_route(self) -> bool:
        """The RFC's activation predicate, exactly."""
        return self.hybrid_swa and self.unified and not self.disable_radix_cache


@dataclass(frozen=True, slots=True)
class Route:
    """The chosen route with the inputs that chose it, for the log and ``/get_server_info``."""

    name: str
    impl: str
    inputs: RouteInputs

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "impl": self.impl,
            "predicate": asdict(self.inputs) | {"new_route": self.inputs.new_route},
        }


@dataclass(frozen=True, slots=True)
class TreeCacheBuildContext:
    """What a cache factory builds from."""

    server_args: Any
    params: CacheInitParams
    is_hybrid_swa: bool
    disable_radix_cache: bool
    effective_chunked_prefill_size: int | None
    model_config: Any
    tp_size: int
    is_hybrid_recurrent: bool = False


_Rule = tuple[str, str, Callable[[RouteInputs], bool]]
_TABLE: tuple[_Rule, ...] = (
    ("swa_chunk", "SWAChunkCache", lambda i: i.hybrid_swa and i.disable_radix_cache),
    ("unified_swa", "UnifiedRadixCache(FULL,SWA)", lambda i: i.hybrid_swa and i.unified),
    ("legacy_swa", "SWARadixCache", lambda i: i.hybrid_swa),
    ("chunk", "ChunkCache", lambda i: i.chunked_prefill and i.disable_radix_cache),
    (
        "unified_recurrent",
        "UnifiedRadixCache(FULL,RECURRENT)",
        lambda i: i.recurrent and i.unified and not i.disable_radix_cache,
    ),
    ("unified_full", "UnifiedRadixCache(FULL)", lambda i: i.unified and not i.disable_radix_cache),
    ("radix", "RadixCache", lambda i: True),
)


def select_route(inputs: RouteInputs) -> Route:
    """First row of the table that matches; total."""
    name, impl, _ = next(rule for rule in _TABLE if rule[2](inputs))
    return Route(name, impl, inputs)


def flag_on(server_args: Any, name: str) -> bool:
    """True only for the literal True: a test double's unset attribute is not a set flag."""
    return getattr(server_args, name, False) is True


def chunked_prefill_size(server_args: Any) -> int | None:
    """The chunk size, or None when chunked prefill is off (None or -1)."""
    size = server_args.chunked_prefill_size
    return size if isinstance(size, int) and size > 0 else None


def route_for(server_args: Any, is_hybrid_swa: bool, is_hybrid_recurrent: bool = False) -> Route:
    """The route of a server: pure, legal before anything is built (start-up plan, preflight, server info)."""
    return select_route(
        RouteInputs(
            hybrid_swa=is_hybrid_swa,
            disable_radix_cache=flag_on(server_args, "disable_radix_cache"),
            unified=flag_on(server_args, "enable_unified_radix_tree"),
            chunked_prefill=chunked_prefill_size(server_args) is not None,
            recurrent=is_hybrid_recurrent,
        )
    )


def route_of(ctx: TreeCacheBuildContext) -> Route:
    """The route of a build context."""
    return select_route(
        RouteInputs(
            hybrid_swa=bool(ctx.is_hybrid_swa),
            disable_radix_cache=bool(ctx.disable_radix_cache),
            unified=flag_on(ctx.server_args, "enable_unified_radix_tree"),
            chunked_prefill=ctx.effective_chunked_prefill_size is not None,
            recurrent=bool(ctx.is_hybrid_recurrent),
        )
    )


# ----------------------------------------------------------------------------------------------------------- factories
def _model_shape(ctx: TreeCacheBuildContext) -> dict[str, Any]:
    return {
        "kv_head_num": ctx.model_config.get_num_kv_heads(ctx.tp_size),
        "head_dim": ctx.model_config.head_dim,
        "layer_num": ctx.model_config.num_hidden_layers,
        "max_seq_len": ctx.server_args.max_seq_len,
    }


def _swa_chunk(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    from sgl_jax.srt.mem_cache.chunk_cache import SWAChunkCache

    p = ctx.params
    if p.sliding_window_size is None:
        raise ValueError("sliding_window_size is missing: a hybrid model needs the window of its SWA layers")
    return SWAChunkCache(
        p.req_to_token_pool, p.token_to_kv_pool_allocator, p.page_size, p.sliding_window_size
    )


def _chunk(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    from sgl_jax.srt.mem_cache.chunk_cache import ChunkCache

    return ChunkCache(
        ctx.params.req_to_token_pool, ctx.params.token_to_kv_pool_allocator, ctx.params.page_size
    )


def _legacy_swa(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    from sgl_jax.srt.mem_cache.swa_radix_cache import SWARadixCache

    p = ctx.params
    if p.sliding_window_size is None:
        raise ValueError("sliding_window_size is missing: a hybrid model needs the window of its SWA layers")
    return SWARadixCache(
        p.req_to_token_pool, p.token_to_kv_pool_allocator, p.sliding_window_size, p.page_size
    )


def _radix(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    from sgl_jax.srt.mem_cache.radix_cache import RadixCache

    p = ctx.params
    return RadixCache(
        p.req_to_token_pool,
        p.token_to_kv_pool_allocator,
        page_size=p.page_size,
        disable=ctx.disable_radix_cache,
        is_eagle=p.is_eagle,
        **_model_shape(ctx),
    )


def _unified(ctx: TreeCacheBuildContext, *names: str) -> BasePrefixCache:
    from sgl_jax.srt.mem_cache.unified_cache_components import ComponentType
    from sgl_jax.srt.mem_cache.unified_radix_cache import COMPONENT_REGISTRY, UnifiedRadixCache

    kinds = tuple(ComponentType[name] for name in names)
    absent = [kind.name for kind in kinds if kind not in COMPONENT_REGISTRY]
    if absent:
        raise ValueError(
            f"--enable-unified-radix-tree (also spelled --enable-unified-radix-cache) on a model with {'+'.join(names)} "
            f"layers: the {', '.join(absent)} component is not part of this release; serve a model without such layers"
        )
    p = ctx.params
    return UnifiedRadixCache(
        p.req_to_token_pool,
        p.token_to_kv_pool_allocator,
        page_size=p.page_size,
        is_eagle=p.is_eagle,
        tree_components=kinds,
        enable_recurrent_extra_buffer=p.enable_recurrent_extra_buffer,
        recurrent_track_interval=p.recurrent_track_interval,
        component_init_params=p,
        **_model_shape(ctx),
    )


_FACTORIES: dict[str, Callable[[TreeCacheBuildContext], BasePrefixCache]] = {
    "swa_chunk": _swa_chunk,
    "unified_swa": lambda ctx: _unified(ctx, "FULL", "SWA"),
    "legacy_swa": _legacy_swa,
    "chunk": _chunk,
    "unified_recurrent": lambda ctx: _unified(ctx, "FULL", "RECURRENT"),
    "unified_full": lambda ctx: _unified(ctx, "FULL"),
    "radix": _radix,
}


def default_radix_cache_factory(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """Build the cache of the context's route. Raises ValueError for a component this release does not have."""
    return _FACTORIES[route_of(ctx).name](ctx)


def create_tree_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """As :func:`default_radix_cache_factory`, and log the route with everything that chose it."""
    route = route_of(ctx)
    cache = default_radix_cache_factory(ctx)
    i = route.inputs
    logger.info(
        "Tree cache initialized: impl=%s hybrid_swa=%s route=%s (unified=%s disable_radix_cache=%s chunked_prefill=%s "
        "recurrent=%s)",
        route.impl,
        i.hybrid_swa,
        route.name,
        i.unified,
        i.disable_radix_cache,
        i.chunked_prefill,
        i.recurrent,
    )
    return cache
