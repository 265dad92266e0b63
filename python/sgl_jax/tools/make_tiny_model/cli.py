"""Command line of ``sgl-jax make-tiny-model``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_jax.tools.make_tiny_model.families import FAMILIES
from sgl_jax.tools.make_tiny_model.writer import TinyModelError, make_tiny_model


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sgl-jax make-tiny-model",
        description="Write a tiny random checkpoint (HF layout, tokenizer and chat template included). The same arguments give "
        "the same bytes on any machine.",
    )
    parser.add_argument("--family", required=True, choices=sorted(FAMILIES), help="architecture to imitate")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--window",
        type=int,
        default=None,
        metavar="W",
        help="sliding window in keys, itself included (32); Gemma only",
    )
    parser.add_argument(
        "--layers", type=int, default=None, metavar="N", help="decoder layers (6 Gemma, 4 others)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the weights (0)")
    parser.add_argument("--force", action="store_true", help="replace the files of an existing folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 written, 2 refused (the message on stderr names argument, value and remedy)."""
    args = build_parser().parse_args(argv)
    try:
        made = make_tiny_model(args.family, args.out, args.window, args.layers, args.seed, force=args.force)
    except TinyModelError as error:
        print(f"make-tiny-model: {error}", file=sys.stderr)
        return 2
    print(f"{made.parameters:,} parameters in {made.tensors} tensors written to {args.out}")
    return 0
