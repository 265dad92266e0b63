"""``python -m sgl_jax.launch_server --model-path FOLDER [flags]``: serve a checkpoint until SIGTERM."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from sgl_jax.srt.server_args import ServerArgs, ServerArgsError
from sgl_jax.srt.server_args.cli import build_parser


def check_model_path(args: ServerArgs) -> None:
    """The checkpoint folder is there, and its configuration can be served. No JAX, so that a mistake is told at once.

    Raises:
        ServerArgsError: naming folder, file and remedy. ModelConfigError: naming file, key and value, or --context-length.
    """
    from sgl_jax.srt.configs.model_config import ModelConfig

    folder = Path(args.model_path)
    if not folder.is_dir():
        raise ServerArgsError(
            "--model-path", folder, "is not a folder", "Give a local checkpoint (nothing is ever downloaded)"
        )
    if not (folder / "config.json").is_file():
        raise ServerArgsError(
            "--model-path", folder, "holds no config.json", "Give the folder of an HF checkpoint"
        )
    ModelConfig.from_path(folder, {"context_length": args.context_length})


def configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="[%(asctime)s] %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for noisy in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def choose_platform(args: ServerArgs) -> None:
    """``--device`` for this process and its children, before anything imports jax."""
    if args.device != "auto":
        os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(args.device, args.device)


def show_plan(args: ServerArgs) -> int:
    """Prints the start-up plan and starts nothing."""
    check_model_path(args)
    choose_platform(args)
    from sgl_jax.srt.mem_cache.registry import route_for
    from sgl_jax.srt.model_executor.memory_budget import make_plan, plan_text
    from sgl_jax.srt.model_executor.worker import resolve_model_config

    config = resolve_model_config(args)
    plan = make_plan(args, config)
    route = route_for(args, config.is_hybrid_swa and not args.disable_hybrid_swa_memory)
    print(arguments_text(args))
    print(f"Route: {json.dumps(route.to_dict())}")
    print(plan_text(plan))
    return 0


def arguments_text(args: ServerArgs) -> str:
    """Every argument that is not a plain default, with where it came from."""
    rows = [(n, d) for n, d in args.describe().items() if d["source"] != "default"]
    lines = [f"  {n} = {d['value']}  ({d['source']}{': ' + d['note'] if d['note'] else ''})" for n, d in rows]
    return "\n".join(["Arguments (all others are defaults):", *lines])


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


@contextlib.contextmanager
def leaving_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the process with 0 and no traceback, until the server drains by itself."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, _leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def serve(args: ServerArgs, on_ready: Callable[[ServerArgs], None] | None = None) -> int:
    """Serves; returns the exit code."""
    with leaving_on_signals():
        check_model_path(args)
        configure_logging(args.log_level)
        choose_platform(args)
        from sgl_jax.srt.entrypoints.http_server import launch

        return launch(args, on_ready=on_ready)


def main(argv: Sequence[str] | None = None, prog: str = "python -m sgl_jax.launch_server") -> int:
    """Exit codes: 0 after SIGTERM or --dry-run, 1 when the server failed, 2 for a flag or checkpoint that cannot start."""
    parser = build_parser(prog)
    parser.add_argument("--dry-run", action="store_true", help="print the start-up plan and start nothing")
    namespace = parser.parse_args(argv)
    try:
        args = ServerArgs.from_cli_args(namespace)
        return show_plan(args) if namespace.dry_run else serve(args)
    except ValueError as error:  # flags, checkpoints, plans: all name flag or file, value and remedy
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
