"""``sgl-jax``: one word per job. Every command imports what it needs only when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from sgl_jax import __version__

Command = Callable[[Sequence[str]], int]


def _serve(argv: Sequence[str]) -> int:
    from sgl_jax.launch_server import main

    return main(argv, prog="sgl-jax serve")


def _plan(argv: Sequence[str]) -> int:
    from sgl_jax.launch_server import main

    return main([*argv, "--dry-run"], prog="sgl-jax plan")


def _bench(argv: Sequence[str]) -> int:
    from sgl_jax.tools.bench import main

    return main(argv)


def _make_tiny_model(argv: Sequence[str]) -> int:
    from sgl_jax.tools.make_tiny_model import main

    return main(argv)


def _ledger(argv: Sequence[str]) -> int:
    from sgl_jax.tools.ledger_view import main

    return main(argv)


COMMANDS: dict[str, tuple[str, Command]] = {
    "serve": ("serve a checkpoint over HTTP", _serve),
    "plan": ("print the start-up plan of 'serve' with the same flags, start nothing", _plan),
    "bench": ("benchmarks of the cache and the scheduler", _bench),
    "make-tiny-model": ("write a small reproducible checkpoint", _make_tiny_model),
    "ledger": ("show who owns the KV slots of a running server", _ledger),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sgl-jax COMMAND [flags]",
            "",
            *rows,
            "",
            "sgl-jax COMMAND --help shows the flags; --version the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        print(f"sgl-jax: error: no command {words[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return COMMANDS[words[0]][1](words[1:])


if __name__ == "__main__":
    sys.exit(main())
