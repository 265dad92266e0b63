"""What ``make serve`` runs: a server to try out, on a tiny Gemma-4 checkpoint that is made once, or on ``--model``.

``python -m sgl_jax.tools.serve_tiny [--model FOLDER] [-- FLAGS...]``. Everything after ``--`` goes to the server as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_jax.srt.server_args import ServerArgs

TINY_NAME = "gemma4-tiny"
TINY_FLAGS = ("--family", "gemma4", "--window", "32", "--layers", "6", "--seed", "0")
TRY_OUT = ("--enable-unified-radix-cache", "--enable-cache-report", "--enable-metrics")
TINY_DEFAULTS = {
    "served_model_name": ("--served-model-name", TINY_NAME),
    "max_total_tokens": ("--max-total-tokens", "16384"),
    "max_running_requests": ("--max-running-requests", "16"),
    "chunked_prefill_size": ("--chunked-prefill-size", "512"),
}


def cache_folder() -> Path:
    """``SGL_JAX_CACHE_DIR`` (set by the Makefile), else ``.cache`` here."""
    return Path(os.environ.get("SGL_JAX_CACHE_DIR") or ".cache").absolute()


def tiny_checkpoint() -> Path:
    """The tiny checkpoint, made on the first call. Complete or absent: it is written beside and renamed."""
    folder = cache_folder() / "models" / TINY_NAME
    if (folder / "config.json").is_file():
        return folder
    from sgl_jax.tools.make_tiny_model import main as make_tiny_model

    print(f"Making the tiny checkpoint in {folder} (once) ...", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{TINY_NAME}-{os.getpid()}")
    code = make_tiny_model([*TINY_FLAGS, "--out", str(unfinished)])
    if code:
        raise SystemExit(code)
    os.replace(unfinished, folder)
    return folder


def server_flags(model: str | None, extra: Sequence[str]) -> list[str]:
    """The command line: try-out flags, sizes that suit the tiny model, and the user's own, which win."""
    own = _given(extra)
    words = ["--model-path", model if model is not None else str(tiny_checkpoint()), *TRY_OUT, *extra]
    if model is None:
        for name, pair in TINY_DEFAULTS.items():
            if name == "chunked_prefill_size" and "page_size" in own:
                continue  # the server derives one that fits the page
            if name not in own:
                words += pair
    return words


def _given(extra: Sequence[str]) -> set[str]:
    """Names of the server arguments that the user typed."""
    from sgl_jax.srt.server_args.cli import build_parser

    namespace = build_parser("make serve").parse_args(["--model-path", ".", *extra])
    return set(namespace.typed_spellings) - {"model_path"}


def try_it(args: ServerArgs) -> str:
    """Copy-paste commands for a running server."""
    host = "127.0.0.1" if args.host in ("0.0.0.0", "::") else args.host
    base = f"http://{host}:{args.port}"
    key = ' \\\n    -H "Authorization: Bearer $API_KEY"' if args.api_key else ""
    body = {
        "model": args.served_model_name,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,  # a model with random weights may end at once
    }
    return (
        f"\nReady. Try it{_what_to_expect(args)}:\n\n"
        f"  curl -s {base}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'\n\n"
        f"  curl -s {base}/get_server_info{key}\n"
    )


_SURE_TO_SPAN = 8
"""Tokens that the suggested chat has at least, whatever the tokenizer and the template."""


def _what_to_expect(args: ServerArgs) -> str:
    """What the suggested chat shows, so far as it is certain: whole pages are reused, and random weights say nothing."""
    said = []
    if args.served_model_name == TINY_NAME:
        said.append("the tiny model's weights are random, so its text means nothing")
    if not args.disable_radix_cache:
        if args.page_size <= _SURE_TO_SPAN:
            said.append("the second time reports cached_tokens > 0")
        else:
            said.append(
                f"cached_tokens counts whole pages of {args.page_size} tokens, so only a longer prompt has any"
            )
    return f" ({'; '.join(said)})" if said else ""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="serve_tiny", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--model", help="folder of a supported checkpoint; default: a tiny one that is made once"
    )
    own = parser.parse_args(words[:at])
    from sgl_jax.launch_server import arguments_text, serve

    os.environ.setdefault("SGL_JAX_CACHE_DIR", str(cache_folder()))
    try:
        args = ServerArgs.from_cli(server_flags(own.model, words[at + 1 :]))
        print(
            arguments_text(args), flush=True
        )  # the pool plan follows in the log, from the process that holds the device
        return serve(args, on_ready=lambda ready: print(try_it(ready), flush=True))
    except ValueError as error:  # flags and checkpoints: all name flag or file, value and remedy
        print(f"serve: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
