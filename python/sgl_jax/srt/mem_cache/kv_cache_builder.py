"""Build the prefix cache of a server: refuse what cannot work, choose the route, construct – in that order.

The fail-fast table (RFC-0035 section 7) runs before any cache, allocator or pool is touched. It applies to the new-route
predicate alone; off it, flags of absent features are refused by the server arguments on their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_jax.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    chunked_prefill_size,
    create_tree_cache,
    flag_on,
    route_for,
)

__all__ = ["build_kv_cache", "create_tree_cache", "init_hicache", "refuse_unsupported"]

_SPELLINGS = ("--enable-unified-radix-tree", "--enable-unified-radix-cache")


def _unified_as_typed(server_args: Any) -> str:
    """The unified flag as the user typed it, then its other spelling."""
    notes = getattr(server_args, "notes", None)
    typed = notes.get("enable_unified_radix_tree", "") if isinstance(notes, Mapping) else ""
    if typed in _SPELLINGS:
        other = next(s for s in _SPELLINGS if s != typed)
        return f"{typed} (also spelled {other})"
    names = f"{_SPELLINGS[0]} (also spelled {_SPELLINGS[1]})"
    return f"{typed}, that is {names}" if typed else names


def _speculative(spec_algorithm: Any) -> str | None:
    """Name of a real speculative algorithm, else None. Accepts None, the enum and its names."""
    if spec_algorithm is None:
        return None
    name = spec_algorithm if isinstance(spec_algorithm, str) else getattr(spec_algorithm, "name", None)
    return None if not isinstance(name, str) or name.upper() == "NONE" else name


def _set_text(server_args: Any, name: str, off: tuple[str, ...]) -> str | None:
    """The flag's text when it is set to something else than ``off``; a test double's unset attribute is off."""
    value = getattr(server_args, name, None)
    if value is True:
        return "on"
    return value if isinstance(value, str) and value not in off else None


def refuse_unsupported(server_args: Any, is_hybrid_recurrent: bool, spec_algorithm: Any) -> None:
    """The fail-fast table of the new route. Raises ValueError naming both flags and the legal alternative.

    Reads flags only; legal before anything is built (``sgl-jax preflight`` and the start-up plan call it too).
    """
    hicache = _set_text(server_args, "hicache_storage", ("disable",))
    speculative = _speculative(spec_algorithm)
    pd = _set_text(server_args, "pd_disaggregation", ("",))
    mode = _set_text(server_args, "disaggregation_mode", ("", "null"))
    recurrent = "a model of FULL+SWA+RECURRENT layers" if is_hybrid_recurrent else None
    table: tuple[tuple[str | None, str], ...] = (
        (recurrent, "one tree holds at most FULL and SWA"),
        (hicache and f"--hicache-storage {hicache}", "SWA pages have no host tier"),
        (speculative and f"--speculative-algorithm {speculative}", "draft tokens are not tracked per pool"),
        (pd and f"--pd-disaggregation {pd}", "SWA pages are not transferred between servers"),
        (mode and f"--disaggregation-mode {mode}", "SWA pages are not transferred between servers"),
    )
    for other, why in table:
        if other is None:
            continue
        remedy = f"leave out {other.split(' ')[0]}" if other.startswith("--") else "serve another model"
        raise ValueError(
            f"{_unified_as_typed(server_args)} conflicts with {other}: {why}. Legal: {remedy}, or take the legacy route "
            f"by leaving out the unified flag where that route supports it"
        )


def init_hicache(cache: BasePrefixCache, server_args: Any, mesh: Any, allocator: Any) -> None:
    """The host tier is not part of this release. Raises ValueError naming the flag."""
    raise ValueError(
        f"--hicache-storage {server_args.hicache_storage}: the host tier (HiCache) is not part of this release; leave "
        "the flag out (default: disable)"
    )


def build_kv_cache(
    *,
    server_args: Any,
    model_config: Any,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    page_size: int,
    is_hybrid: bool,
    is_hybrid_recurrent: bool = False,
    sliding_window_size: int | None,
    tp_size: int,
    spec_algorithm: Any,
    mesh: Any = None,
) -> BasePrefixCache:
    """Refuse, route, build. Raises ValueError before construction for every combination in the fail-fast table."""
    route = route_for(server_args, bool(is_hybrid), bool(is_hybrid_recurrent))
    if route.inputs.new_route:
        refuse_unsupported(server_args, is_hybrid_recurrent, spec_algorithm)
    speculative = _speculative(spec_algorithm)
    interval = getattr(server_args, "recurrent_track_interval", None)
    cache = create_tree_cache(
        TreeCacheBuildContext(
            server_args=server_args,
            params=CacheInitParams(
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
                page_size=page_size,
                is_eagle=speculative is not None and speculative.upper() in ("EAGLE", "EAGLE3", "NEXTN"),
                sliding_window_size=sliding_window_size if is_hybrid else None,
                enable_recurrent_extra_buffer=flag_on(server_args, "enable_recurrent_extra_buffer"),
                recurrent_track_interval=interval if isinstance(interval, int) else None,
            ),
            is_hybrid_swa=bool(is_hybrid),
            disable_radix_cache=flag_on(server_args, "disable_radix_cache"),
            effective_chunked_prefill_size=chunked_prefill_size(server_args),
            model_config=model_config,
            tp_size=tp_size,
            is_hybrid_recurrent=bool(is_hybrid_recurrent),
        )
    )
    if _set_text(server_args, "hicache_storage", ("disable",)) is not None:
        init_hicache(cache, server_args, mesh, token_to_kv_pool_allocator)
    return cache
