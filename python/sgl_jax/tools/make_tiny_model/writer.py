"""Writing a tiny checkpoint: numpy, safetensors and tokenizers only."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sgl_jax.srt.models.random_weights import WeightRecipe
from sgl_jax.tools.make_tiny_model.families import DEFAULT_WINDOW, FAMILIES, POSITIONS, VOCAB
from sgl_jax.tools.make_tiny_model.tokenizer import TURN_END, build_tokenizer, tokenizer_config


class TinyModelError(ValueError):
    """The checkpoint cannot be made as asked; names argument, value and remedy."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What was written."""

    path: Path
    tensors: int
    parameters: int


def make_tiny_model(
    family: str,
    out: str | Path,
    window: int | None = None,
    layers: int | None = None,
    seed: int = 0,
    *,
    force: bool = False,
) -> TinyModel:
    """Write a checkpoint of ``family`` to ``out``; equal arguments give equal bytes.

    The folder appears complete or not at all. Raises TinyModelError for an unknown family, a window where the family has none, sizes
    below 1, and an ``out`` that already holds files (unless ``force``).
    """
    out = Path(out)
    tiny = _checked(family, out, window, layers, seed, force)
    config, shapes = tiny.build(layers or tiny.layers, window or DEFAULT_WINDOW)
    recipe = WeightRecipe.for_family(family, config["hidden_size"], config["tie_word_embeddings"])
    weights = {name: recipe.make(seed, name, shape) for name, shape in sorted(shapes.items())}
    staging = out.with_name(f"{out.name}.partial-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write(staging, config, weights)
        if force and out.exists():
            shutil.rmtree(out)
        staging.replace(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return TinyModel(out, len(weights), sum(w.size for w in weights.values()))


def _checked(family: str, out: Path, window: int | None, layers: int | None, seed: int, force: bool) -> Any:
    if family not in FAMILIES:
        raise TinyModelError(f"--family {family!r} is not known; choose one of {', '.join(FAMILIES)}")
    tiny = FAMILIES[family]
    if window is not None and not tiny.windowed:
        raise TinyModelError(
            f"--window {window}: {family} has no window layers; leave it out or use gemma3, gemma4"
        )
    for flag, value in (("--window", window), ("--layers", layers)):
        if value is not None and value < 1:
            raise TinyModelError(f"{flag} is {value}, must be at least 1")
    if seed < 0:
        raise TinyModelError(f"--seed is {seed}, must be at least 0")
    if out.exists() and not out.is_dir():
        raise TinyModelError(f"--out {out} is a file; name a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise TinyModelError(f"--out {out} is not empty; name a new folder or pass --force")
    if force and out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        raise TinyModelError(f"--out {out} does not look like a checkpoint; --force will not replace it")
    return tiny


def _write(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    generation = {"bos_token_id": 2, "eos_token_id": [1, TURN_END], "pad_token_id": 0}
    for name, data in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config(POSITIONS)),
    ):
        (folder / name).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    build_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600
    folder.chmod(0o755)
