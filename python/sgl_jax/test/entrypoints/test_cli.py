"""``sgl-jax`` lists its commands, refuses others, and its plan starts nothing."""

from __future__ import annotations

import pytest

from sgl_jax import __version__
from sgl_jax.cli import COMMANDS, main
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
    from sgl_jax.srt.server_args import ServerArgs

    text = try_it(ServerArgs(model_path="m", host="0.0.0.0", port=1234, api_key="k"))
    assert "curl -s http://127.0.0.1:1234/v1/chat/completions" in text
    assert "curl -s http://127.0.0.1:1234/get_server_info" in text
    assert '"Authorization: Bearer $API_KEY"' in text
