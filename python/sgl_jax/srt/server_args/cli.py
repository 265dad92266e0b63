"""argparse over the flag table."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sgl_jax.srt.server_args.flags import FLAGS, GROUPS, Flag
from sgl_jax.srt.server_args.sizes import parse_size


class FlagParser(argparse.ArgumentParser):
    """An unknown flag is an error with a suggestion; abbreviations are off, so a new flag never changes an old command."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault(
            "formatter_class", lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=118)
        )
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments:"):
            words = [w.split("=")[0] for w in message.split(":", 1)[1].split() if w.startswith("--")]
            near = [m for w in words for m in difflib.get_close_matches(w, self._option_string_actions, n=1)]
            if near:
                message += f" (did you mean {', '.join(near)}?)"
        self.exit(2, f"{self.prog}: error: {message}\n(--help lists all flags)\n")


class _Record(argparse.Action):
    """Stores the value and the spelling that was typed, for messages and provenance."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        typed = dict(getattr(namespace, "typed_spellings", {}))
        value = self.const if self.nargs == 0 else values
        if self.dest in typed and getattr(namespace, self.dest) != value:
            parser.error(
                f"{typed[self.dest]} {getattr(namespace, self.dest)} and {option_string} {value} give one setting twice: leave one out"
            )
        typed[self.dest] = option_string or self.option_strings[0]
        namespace.typed_spellings = typed
        setattr(namespace, self.dest, value)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_CONVERT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "size": _size,
    "float": float,
    "ints": _size,
}


def _help(flag: Flag) -> str:
    parts = [flag.help]
    if flag.choices:
        parts.append("{" + ", ".join(flag.choices) + "}")
    if flag.default is not None and flag.kind != "bool" and flag.default != "":
        parts.append(f"[{flag.default}]")
    elif flag.derived_from:
        parts.append(f"[from {flag.derived_from}]")
    return " ".join(parts).replace("%", "%%")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every server flag, grouped. Flags that are not typed leave no trace in the namespace."""
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    for flag in FLAGS:
        extra: dict[str, Any] = {
            "dest": flag.name,
            "default": argparse.SUPPRESS,
            "help": _help(flag),
            "action": _Record,
        }
        if flag.kind == "bool":
            extra |= {"nargs": 0, "const": True}
        else:
            extra |= {
                "type": _CONVERT[flag.kind],
                "metavar": "N" if flag.kind in ("int", "size") else flag.kind.upper(),
            }
        if flag.kind == "ints":
            extra |= {"nargs": "+", "metavar": "N"}
        groups[flag.group].add_argument(*flag.spellings, required=flag.name == "model_path", **extra)


def build_parser(prog: str = "python -m sgl_jax.launch_server") -> FlagParser:
    parser = FlagParser(
        prog=prog,
        description="Serve a local checkpoint over HTTP. Sizes may be typed 100k (100000) or 4K (4096).",
    )
    add_flags(parser)
    return parser


def split_typed(argv: Sequence[str]) -> list[str]:
    """Drops one leading ``--``, which ``make serve ARGS=...`` puts before the server's own flags."""
    words = list(argv)
    return words[1:] if words[:1] == ["--"] else words
