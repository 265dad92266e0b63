"""The flag table is complete, parses as documented, and agrees with the fields."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from sgl_jax.srt.server_args import FIELD_NAMES, ServerArgs, ServerArgsError, parse_size
from sgl_jax.srt.server_args.flags import FLAGS

DEFAULTS = {
    "host": "127.0.0.1",
    "port": 30000,
    "tp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "dp_schedule_policy": "cache_aware",
    "page_size": 1,
    "mem_fraction_static": None,
    "max_total_tokens": None,
    "swa_full_tokens_ratio": 0.8,
    "disable_hybrid_swa_memory": False,
    "chunked_prefill_size": 4096,
    "disable_radix_cache": False,
    "enable_unified_radix_tree": False,
    "enable_cache_report": False,
    "enable_metrics": False,
    "schedule_policy": "fcfs",
    "decode_log_interval": 40,
    "watchdog_timeout": 300.0,
    "nnodes": 1,
    "node_rank": 0,
    "hicache_storage": "disable",
    "hicache_ratio": 2.0,
    "hicache_write_through_threshold": 1,
    "hicache_write_policy": "write_through",
    "speculative_algorithm": None,
    "pd_disaggregation": "",
    "disaggregation_mode": "null",
}


@pytest.fixture(autouse=True)
def no_environment_switch(monkeypatch):
    monkeypatch.delenv("SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE", raising=False)


def parse(*words: str) -> ServerArgs:
    return ServerArgs.from_cli(["--model-path", "m", *words])


def test_table_and_fields_agree():
    assert [flag.name for flag in FLAGS] == list(FIELD_NAMES)


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults(name, value):
    args = parse()
    assert getattr(args, name) == value
    assert type(getattr(args, name)) is type(value)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--tensor-parallel-size", "4"], "tp_size", 4),
        (["--tp-size", "4", "--data-parallel-size", "2"], "dp_size", 2),
        (["--enable-unified-radix-cache"], "enable_unified_radix_tree", True),
        (["--enable-unified-radix-tree"], "enable_unified_radix_tree", True),
        (["--max-total-tokens", "100k"], "max_total_tokens", 100_000),
        (["--context-length", "4K"], "context_length", 4096),
        (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
        (["--page-size=128"], "page_size", 128),
        (["--precompile-bs-paddings", "8", "1", "8"], "precompile_bs_paddings", (1, 8)),
        (["--debug-cache"], "debug_cache", True),
        (["--watchdog-timeout", "2.5"], "watchdog_timeout", 2.5),
    ],
)
def test_spellings_and_sizes(words, name, value):
    args = parse(*words)
    assert getattr(args, name) == value
    assert args.provenance[name] == "user"


def test_model_spelled_either_way():
    assert ServerArgs.from_cli(["--model", "m"]).model_path == "m"
    assert ServerArgs.from_cli(["--model-path", "m"]).served_model_name == "m"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("100k", 100_000),
        ("1.5k", 1500),
        ("4K", 4096),
        ("2m", 2_000_000),
        ("1M", 2**20),
        ("-1", -1),
        ("1_000", 1000),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "12x", "1e3", "0x10", "--1"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="number"):
        parse_size(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pege-size", "1"], "did you mean --page-size?"),
        (["--page", "1"], "unrecognized arguments: --page"),
        (["--page-size", "many"], "argument --page-size: 'many' is not a number"[:22]),
        (["--page-size", "1", "--page-size", "2"], "--page-size 1 and --page-size 2"),
        (["--enable-metrics", "yes"], "unrecognized arguments: yes"),
    ],
)
def test_syntax_errors_exit_2(words, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(*words)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


def test_model_path_is_required(capsys):
    with pytest.raises(SystemExit):
        ServerArgs.from_cli([])
    assert "--model-path" in capsys.readouterr().err
    with pytest.raises(ServerArgsError, match="--model-path"):
        ServerArgs(page_size=1)


def test_help_is_grouped_and_names_every_flag(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse("--help")
    text = capsys.readouterr().out
    assert exit_info.value.code == 0
    for heading in ("model:", "memory pools:", "prefix cache:", "scheduling:", "logging and metrics:"):
        assert f"\n{heading}\n" in text
    for flag in FLAGS:
        assert all(spelling in text for spelling in flag.spellings)


def test_pickles_and_is_frozen():
    args = parse("--page-size", "128")
    copy = pickle.loads(pickle.dumps(args))
    assert copy == args and copy.provenance == args.provenance
    with pytest.raises(AttributeError):
        args.page_size = 1


def test_imports_without_jax():
    code = "import sys, sgl_jax.srt.server_args, sgl_jax.launch_server, sgl_jax.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_says_where_unset_limits_come_from(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert "[from the device: 64 on CPU, else 256]" in " ".join(capsys.readouterr().out.split())
