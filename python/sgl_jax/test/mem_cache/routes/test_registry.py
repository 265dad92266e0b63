"""The route table of RFC-0035 section 7: every row, first match wins, and the log line."""

import itertools
import logging
from types import SimpleNamespace

import pytest

from sgl_jax.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sgl_jax.srt.mem_cache.cache_init_params import CacheInitParams
from sgl_jax.srt.mem_cache.memory_pool import ReqToTokenPool
from sgl_jax.srt.mem_cache.registry import (
    RouteInputs,
    TreeCacheBuildContext,
    create_tree_cache,
    default_radix_cache_factory,
    route_for,
    route_of,
    select_route,
)
from sgl_jax.test.stateful.build import build_allocator

MODEL = SimpleNamespace(get_num_kv_heads=lambda tp: 2, head_dim=8, num_hidden_layers=2)


def args(unified=False, disabled=False, chunk=4096):
    return SimpleNamespace(
        enable_unified_radix_tree=unified,
        disable_radix_cache=disabled,
        chunked_prefill_size=chunk,
        max_seq_len=128,
    )


def context(hybrid, unified=False, disabled=False, chunk=4096, window=8, recurrent=False):
    allocator = build_allocator(1, 16, 16, 1) if hybrid else TokenToKVPoolAllocator(16, None)
    server_args = args(unified, disabled, chunk)
    return TreeCacheBuildContext(
        server_args=server_args,
        params=CacheInitParams(
            ReqToTokenPool(2, 32), allocator, 1, sliding_window_size=window if hybrid else None
        ),
        is_hybrid_swa=hybrid,
        disable_radix_cache=disabled,
        effective_chunked_prefill_size=chunk if chunk > 0 else None,
        model_config=MODEL,
        tp_size=1,
        is_hybrid_recurrent=recurrent,
    )


def expected(hybrid, disabled, unified, chunked, recurrent):
    if hybrid and disabled:
        return "swa_chunk"
    if hybrid:
        return "unified_swa" if unified else "legacy_swa"
    if disabled:
        return "chunk" if chunked else "radix"
    if unified:
        return "unified_recurrent" if recurrent else "unified_full"
    return "radix"


@pytest.mark.parametrize("inputs", list(itertools.product([False, True], repeat=5)))
def test_every_combination_has_its_one_route(inputs):
    hybrid, disabled, unified, chunked, recurrent = inputs
    route = select_route(RouteInputs(hybrid, disabled, unified, chunked, recurrent))
    assert route.name == expected(*inputs)
    assert route.inputs.new_route is (hybrid and unified and not disabled)


@pytest.mark.parametrize(
    ("hybrid", "unified", "disabled", "chunk", "cls"),
    [
        (True, True, True, 4096, "SWAChunkCache"),  # radix-disabled goes before the unified flag
        (True, False, True, -1, "SWAChunkCache"),
        (True, True, False, 4096, "UnifiedRadixCache"),
        (True, False, False, 4096, "SWARadixCache"),
        (False, True, True, 4096, "ChunkCache"),
        (False, False, True, 4096, "ChunkCache"),
        (False, True, False, 4096, "UnifiedRadixCache"),
        (False, False, False, 4096, "RadixCache"),
        (False, False, True, -1, "RadixCache"),
    ],
)
def test_the_factory_builds_the_class_of_the_route(hybrid, unified, disabled, chunk, cls):
    ctx = context(hybrid, unified, disabled, chunk)
    cache = default_radix_cache_factory(ctx)
    assert type(cache).__name__ == cls
    assert cache.supports_swa() is hybrid
    if cls == "RadixCache":
        assert cache.disable is disabled
    if hybrid:
        assert cache.sliding_window_size == 8


def test_the_log_line_and_server_info_name_the_route_and_what_chose_it(caplog):
    with caplog.at_level(logging.INFO):
        create_tree_cache(context(True))
    assert "Tree cache initialized: impl=SWARadixCache hybrid_swa=True route=legacy_swa" in caplog.text
    assert route_of(context(True, unified=True)).to_dict() == {
        "name": "unified_swa",
        "impl": "UnifiedRadixCache(FULL,SWA)",
        "predicate": {
            "hybrid_swa": True,
            "disable_radix_cache": False,
            "unified": True,
            "chunked_prefill": True,
            "recurrent": False,
            "new_route": True,
        },
    }


def test_a_component_this_release_lacks_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"--enable-unified-radix-tree.*FULL\+RECURRENT.*not part of this release"
    ):
        default_radix_cache_factory(context(False, unified=True, recurrent=True))


def test_one_flag_rolls_forward_and_back():
    names = [route_for(args(unified=flag), True).name for flag in (True, False)]
    assert names == ["unified_swa", "legacy_swa"]


def test_a_hybrid_route_without_a_window_is_refused():
    for disabled in (True, False):
        with pytest.raises(ValueError, match="sliding_window_size"):
            default_radix_cache_factory(context(True, disabled=disabled, window=None))


def test_the_legacy_cache_knows_nothing_of_the_unified_code():
    import ast
    from pathlib import Path

    import sgl_jax.srt.mem_cache.radix_cache as plain
    import sgl_jax.srt.mem_cache.swa_radix_cache as legacy

    files = [*Path(legacy.__file__).parent.glob("*.py"), Path(plain.__file__)]
    imported = {
        node.module or ""
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert [name for name in sorted(imported) if "unified" in name] == []
