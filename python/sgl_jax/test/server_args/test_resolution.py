"""Where values come from, and what stops the start: conflicts, absent features, bad values (D77, D74)."""

from __future__ import annotations

import pytest

from sgl_jax.srt.server_args import FlagConflictError, ServerArgs, ServerArgsError

ENV = "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE"


@pytest.fixture(autouse=True)
def no_environment_switch(monkeypatch):
    monkeypatch.delenv(ENV, raising=False)


def parse(*words: str) -> ServerArgs:
    return ServerArgs.from_cli(["--model-path", "m", *words])


def test_sources():
    args = parse("--page-size", "128", "--max-running-requests", "8")
    assert args.provenance["page_size"] == "user"
    assert args.provenance["swa_full_tokens_ratio"] == "default"
    assert args.provenance["dp_schedule_policy"] == "derived"
    assert args.provenance["tokenizer_path"] == "derived"
    late = args.with_resolved("model", context_length=4096)
    assert (late.context_length, late.provenance["context_length"]) == (4096, "model")
    assert args.context_length is None
    with pytest.raises(ServerArgsError, match="--page-size 128: was given explicitly"):
        args.with_resolved("derived", page_size=1)


def test_constructor_resolves_like_the_command_line():
    assert ServerArgs(model_path="m", page_size=128) == parse("--page-size", "128")
    with pytest.raises(TypeError, match="pag_size"):
        ServerArgs(model_path="m", pag_size=128)


@pytest.mark.parametrize(
    ("page", "chunk", "source"),
    [(1, 4096, "default"), (128, 4096, "default"), (96, 4032, "derived"), (8192, 8192, "derived")],
)
def test_default_chunk_fits_the_page(page, chunk, source):
    args = parse("--page-size", str(page))
    assert (args.chunked_prefill_size, args.provenance["chunked_prefill_size"]) == (chunk, source)


def test_rank_policy_follows_the_radix_cache():
    assert parse().dp_schedule_policy == "cache_aware"
    assert parse("--disable-radix-cache").dp_schedule_policy == "min_running_queue"


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_environment_switch(monkeypatch, value, on):
    monkeypatch.setenv(ENV, value)
    args = parse()
    assert args.enable_unified_radix_tree is on
    assert args.enable_unified_radix_cache is on
    assert args.provenance["enable_unified_radix_tree"] == ("environment" if on else "default")


def test_environment_switch_with_a_typo_stops_the_start(monkeypatch):
    monkeypatch.setenv(ENV, "yep")
    with pytest.raises(ServerArgsError, match="must be 1 or 0"):
        parse()


def test_radix_disabled_wins_over_the_unified_flag():
    args = parse("--disable-radix-cache", "--enable-unified-radix-cache")
    assert args.disable_radix_cache and args.enable_unified_radix_cache


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--chunked-prefill-size", "100", "--page-size", "128"], ["100", "--page-size 128", "128"]),
        (["--chunked-prefill-size", "300", "--page-size", "128"], ["multiple", "Nearest legal value: 256"]),
        (["--chunked-prefill-size", "0"], ["--chunked-prefill-size 0", ">= 1, or -1"]),
        (
            ["--swa-full-tokens-ratio", "1.5"],
            ["--swa-full-tokens-ratio 1.5", "<= 1", "Nearest legal value: 1"],
        ),
        (["--swa-full-tokens-ratio", "0"], ["> 0", "default: 0.8"]),
        (["--swa-full-tokens-ratio", "nan"], ["finite"]),
        (["--mem-fraction-static", "-0.1"], ["--mem-fraction-static -0.1", "> 0"]),
        (["--page-size", "0"], ["--page-size 0", ">= 1"]),
        (["--port", "70000"], ["--port 70000", "65535"]),
        (["--schedule-policy", "lmp"], ["fcfs, lpm, random", "Nearest legal value: lpm"]),
        (["--tp-size", "4", "--dp-size", "3"], ["--dp-size 3", "--tp-size 4"]),
        (["--dp-size", "2"], ["--dp-size 2", "--tp-size 1", "--tp-size 2"]),
        (["--precompile-bs-paddings", "0"], ["--precompile-bs-paddings 0", ">= 1"]),
    ],
)
def test_bad_values_name_flag_value_limit_and_nearest(words, parts):
    with pytest.raises(ServerArgsError) as error:
        parse(*words)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        (
            ["--disable-hybrid-swa-memory", "--swa-full-tokens-ratio", "0.3"],
            "--swa-full-tokens-ratio 0.3",
            "--disable-hybrid-swa-memory",
        ),
        (
            ["--disable-radix-cache", "--schedule-policy", "lpm"],
            "--schedule-policy lpm",
            "--disable-radix-cache",
        ),
        (
            ["--disable-radix-cache", "--dp-schedule-policy", "cache_aware"],
            "--dp-schedule-policy cache_aware",
            "--disable-radix-cache",
        ),
        (
            ["--disable-precompile", "--precompile-bs-paddings", "8"],
            "--precompile-bs-paddings",
            "--disable-precompile",
        ),
        (["--skip-tokenizer-init", "--chat-template", "f"], "--chat-template f", "--skip-tokenizer-init"),
        (["--hicache-ratio", "3"], "--hicache-ratio 3", "--hicache-storage disable"),
        (["--node-rank", "1"], "--node-rank 1", "--nnodes 1"),
        (["--dist-init-addr", "h:1"], "--dist-init-addr h:1", "--nnodes 1"),
    ],
)
def test_conflicts_name_both_flags(words, first, second):
    with pytest.raises(FlagConflictError) as error:
        parse(*words)
    assert first in str(error.value) and second in str(error.value)


ABSENT = [
    ["--hicache-storage", "none"],
    ["--hicache-storage", "file"],
    ["--speculative-algorithm", "EAGLE"],
    ["--pd-disaggregation", "prefill"],
    ["--disaggregation-mode", "decode"],
    ["--enable-recurrent-extra-buffer"],
]


@pytest.mark.parametrize(
    "words",
    [*ABSENT, ["--ep-size", "2"], ["--nnodes", "2"], ["--attention-backend", "fa"], ["--moe-backend", "x"]],
)
def test_absent_features_are_refused_by_name(words):
    with pytest.raises(ServerArgsError) as error:
        parse(*words)
    assert str(error.value).startswith(" ".join(words) + ": refused")
    assert "not part of this release" in str(error.value)


@pytest.mark.parametrize("words", ABSENT)
@pytest.mark.parametrize("spelling", ["--enable-unified-radix-cache", "--enable-unified-radix-tree"])
def test_on_the_unified_route_the_message_names_both_flags(words, spelling):
    with pytest.raises(FlagConflictError) as error:
        parse(spelling, *words)
    text = str(error.value)
    assert text.startswith(spelling)
    assert text.index("--enable-unified-radix-tree") < text.index(words[0])


def test_off_the_predicate_an_absent_feature_is_judged_on_its_own():
    with pytest.raises(ServerArgsError, match=r"^--hicache-storage file: refused"):
        parse("--enable-unified-radix-cache", "--disable-radix-cache", "--hicache-storage", "file")


@pytest.mark.parametrize("value", ["NONE", "none"])
def test_no_speculation_is_accepted(value):
    assert parse("--speculative-algorithm", value).speculative_algorithm == value


def test_description_masks_the_key_and_shows_sources():
    shown = parse("--api-key", "secret", "--dp-size", "1").describe()
    assert shown["api_key"] == {"value": "***", "source": "user", "note": "--api-key"}
    assert "secret" not in repr(parse("--api-key", "secret"))


def test_none_in_the_constructor_is_not_given_and_conflicts_with_nothing():
    args = ServerArgs(model_path="m", swa_full_tokens_ratio=None, disable_hybrid_swa_memory=True)
    assert (args.swa_full_tokens_ratio, args.provenance["swa_full_tokens_ratio"]) == (0.8, "default")
    assert "swa_full_tokens_ratio" not in args.notes
