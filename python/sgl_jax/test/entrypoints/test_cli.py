"""``sgl-jax`` lists its commands, refuses others, and its plan starts nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sgl_jax import __version__
from sgl_jax.cli import COMMANDS, main
from sgl_jax.launch_server import leaving_on_signals
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.entrypoints.running import GEMMA4
from sgl_jax.tools.serve_tiny import server_flags, try_it


def test_usage(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0 and __version__ in capsys.readouterr().out
    assert main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    try:
        code = main([command, "--help"])
    except SystemExit as end:  # argparse ends by itself
        code = end.code
    assert code == 0
    assert "usage:" in capsys.readouterr().out


def test_plan(capsys, monkeypatch):
    monkeypatch.delenv("SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE", raising=False)
    flags = ["--model-path", str(GEMMA4), "--page-size", "128", "--enable-unified-radix-cache"]
    assert main(["plan", *flags, "--max-total-tokens", "2048"]) == 0
    text = capsys.readouterr().out
    assert "page_size = 128  (user: --page-size)" in text
    assert '"impl": "UnifiedRadixCache(FULL,SWA)"' in text
    assert "2,048 tokens per rank (16 pages + 1 for padding)" in text
    assert main(["plan", *flags, "--max-total-tokens", "128"]) == 2
    assert "use --max-total-tokens" in capsys.readouterr().err


def test_serve_tiny_lets_the_users_flags_win():
    words = server_flags("/model", ["--page-size", "128", "--port", "1"])
    assert words[:2] == ["--model-path", "/model"]
    assert "--enable-unified-radix-cache" in words and "--served-model-name" not in words
    assert words.count("--page-size") == 1


def test_serve_tiny_prints_commands_to_copy():
    text = try_it(ServerArgs(model_path="m", host="0.0.0.0", port=1234, api_key="k"))
    assert "curl -s http://127.0.0.1:1234/v1/chat/completions" in text
    assert "curl -s http://127.0.0.1:1234/get_server_info" in text
    assert '"Authorization: Bearer $API_KEY"' in text
    assert '"ignore_eos": true' in text  # random weights may end at once, and a newcomer wants to see text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"page_size": 1}, "Try it (the second time reports cached_tokens > 0):"),
        (
            {"page_size": 128},
            "Try it (cached_tokens counts whole pages of 128 tokens, so only a longer prompt has any):",
        ),
        ({"disable_radix_cache": True}, "Try it:"),
        (
            {"served_model_name": "gemma4-tiny", "disable_radix_cache": True},
            "Try it (the tiny model's weights are random, so its text means nothing):",
        ),
    ],
)
def test_serve_tiny_promises_only_what_is_certain(arguments, said):
    assert said in try_it(ServerArgs(model_path="m", **arguments))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_server_runs_leaves_without_a_traceback(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end, leaving_on_signals():
        signal.raise_signal(number)
    assert end.value.code == 0
    assert signal.getsignal(number) is before


def test_the_scheduler_process_starts_before_the_dear_imports():
    """HTTP, tokenizer and device libraries are imported while the scheduler's process already loads."""
    code = (
        "import sys, sgl_jax.srt.entrypoints.http_server\n"
        "print([m for m in ('fastapi', 'uvicorn', 'transformers', 'jax', 'flax') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
