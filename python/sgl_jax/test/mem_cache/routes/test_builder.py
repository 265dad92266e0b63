"""The builder refuses before it builds, with both flags and the legal alternative in the text."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from sgl_jax.srt.mem_cache import kv_cache_builder
from sgl_jax.srt.mem_cache.allocator import SWATokenToKVPoolAllocator
from sgl_jax.srt.speculative.spec_info import SpeculativeAlgorithm

UNSUPPORTED = {
    "recurrent": ({"is_hybrid_recurrent": True}, {}, r"FULL\+SWA\+RECURRENT"),
    "hicache": ({}, {"hicache_storage": "none"}, "--hicache-storage none"),
    "speculative": ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, {}, "--speculative-algorithm EAGLE"),
    "pd": ({}, {"pd_disaggregation": "prefill"}, "--pd-disaggregation prefill"),
    "disaggregation": ({}, {"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
}


def server_args(**changes):
    values = {
        "disable_radix_cache": False,
        "chunked_prefill_size": 4096,
        "enable_unified_radix_tree": True,
        "max_seq_len": 128,
        "hicache_storage": "disable",
        "pd_disaggregation": "",
        "disaggregation_mode": "null",
    }
    mock = MagicMock()
    for name, value in (values | changes).items():
        setattr(mock, name, value)
    return mock


def build(patched, args, **changes):
    kwargs = {
        "server_args": args,
        "model_config": MagicMock(),
        "req_to_token_pool": MagicMock(),
        "token_to_kv_pool_allocator": MagicMock(spec=SWATokenToKVPoolAllocator),
        "page_size": 1,
        "is_hybrid": True,
        "sliding_window_size": 8,
        "tp_size": 1,
        "spec_algorithm": None,
    } | changes
    kv_cache_builder.build_kv_cache(**kwargs)
    return kwargs


@pytest.fixture
def patched(monkeypatch):
    calls = SimpleNamespace(create=MagicMock(), hicache=MagicMock())
    monkeypatch.setattr(kv_cache_builder, "create_tree_cache", calls.create)
    monkeypatch.setattr(kv_cache_builder, "init_hicache", calls.hicache)
    return calls


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_combinations_stop_before_anything_is_touched(patched, case):
    """D55: the start stops and names the other flag; no cache and no host tier is made."""
    changes, flags, other = UNSUPPORTED[case]
    pools = {
        "req_to_token_pool": MagicMock(),
        "token_to_kv_pool_allocator": MagicMock(spec=SWATokenToKVPoolAllocator),
    }
    with pytest.raises(ValueError, match=rf"--enable-unified-radix-tree.*{other}.*Legal"):
        build(patched, server_args(**flags), **changes, **pools)
    assert patched.create.mock_calls == patched.hicache.mock_calls == []
    assert pools["req_to_token_pool"].mock_calls == pools["token_to_kv_pool_allocator"].mock_calls == []


@pytest.mark.parametrize("case", [c for c in UNSUPPORTED if c != "hicache"])
@pytest.mark.parametrize("off", [{"enable_unified_radix_tree": False}, {"disable_radix_cache": True}])
def test_the_gates_apply_to_the_new_route_alone(patched, case, off):
    changes, flags, _ = UNSUPPORTED[case]
    build(patched, server_args(**(flags | off)), **changes)
    assert patched.create.call_count == 1


@pytest.mark.parametrize("spec", [None, SpeculativeAlgorithm.NONE, "NONE", "none"])
def test_no_speculative_algorithm_is_no_conflict(patched, spec):
    build(patched, server_args(), spec_algorithm=spec)
    (ctx,) = patched.create.call_args.args
    assert (
        ctx.is_hybrid_swa
        and ctx.params.sliding_window_size == 8
        and ctx.effective_chunked_prefill_size == 4096
    )
    assert patched.hicache.mock_calls == []


def test_unset_attributes_of_a_double_are_not_set_flags(patched):
    args = MagicMock()
    args.disable_radix_cache, args.enable_unified_radix_tree, args.chunked_prefill_size = False, True, -1
    build(patched, args)
    (ctx,) = patched.create.call_args.args
    assert ctx.effective_chunked_prefill_size is None and not ctx.params.enable_recurrent_extra_buffer


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (
            "--enable-unified-radix-cache",
            "--enable-unified-radix-cache (also spelled --enable-unified-radix-tree)",
        ),
        (
            "--enable-unified-radix-tree",
            "--enable-unified-radix-tree (also spelled --enable-unified-radix-cache)",
        ),
        (
            "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE=1",
            "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE=1, that is --enable-unified-radix-tree",
        ),
    ],
)
def test_the_flag_is_named_as_typed_and_in_its_other_spelling(patched, typed, shown):
    """DECISIONS 18."""
    args = SimpleNamespace(**vars(SimpleNamespace(notes={"enable_unified_radix_tree": typed})))
    args.enable_unified_radix_tree, args.disable_radix_cache, args.chunked_prefill_size = True, False, 64
    args.hicache_storage = "none"
    with pytest.raises(ValueError, match="conflicts with --hicache-storage none") as caught:
        build(patched, args)
    assert str(caught.value).startswith(shown)


def test_hicache_off_the_new_route_is_initialised_by_name_and_refused(patched, monkeypatch):
    build(patched, server_args(enable_unified_radix_tree=False, hicache_storage="none"))
    assert patched.hicache.call_count == 1
    monkeypatch.undo()
    with pytest.raises(ValueError, match="--hicache-storage none"):
        kv_cache_builder.init_hicache(MagicMock(), SimpleNamespace(hicache_storage="none"), None, None)


def test_speculative_names():
    assert (
        SpeculativeAlgorithm.from_string(None).is_none()
        and SpeculativeAlgorithm.from_string("eagle3").is_eagle()
    )
    assert [m.name for m in SpeculativeAlgorithm] == [
        "NONE",
        "EAGLE",
        "EAGLE3",
        "NEXTN",
        "STANDALONE",
        "DFLASH",
    ]
    with pytest.raises(ValueError, match="MEDUSA"):
        SpeculativeAlgorithm.from_string("MEDUSA")
