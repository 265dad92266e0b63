"""Strict weight loading: every parameter from exactly one tensor, every tensor into exactly one parameter.

Names: a parameter's module path, after the checkpoint's prefix (``model.``, ``model.language_model.`` or ``language_model.model.``) has been
normalised. Vision and audio towers are left out by a list of prefixes; anything else unexpected is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.models.random_weights import WeightRecipe
from sgl_jax.srt.models.safetensors_file import TensorRef, WeightLoadError, find_tensors

#: tensors of other modalities, never part of the text model
_OTHER_MODALITIES = (
    "vision_tower.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
)
#: buffers old exporters wrote; they are computed, not learned
_COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)
_PROGRESS_BYTES = 256 << 20
_LISTED = 20


@dataclass(frozen=True, slots=True)
class _Target:
    """One parameter: its HF name, abstract value and head replication."""

    name: str
    variable: nnx.Variable
    shape: tuple[int, ...]  # as in the checkpoint, before replication
    copies: int
    heads: int


def load_weights(model: nnx.Module, config: ModelConfig, load_format: str = "auto", seed: int = 0) -> None:
    """Fill ``model``'s abstract parameters in place, each laid out as its sharding says and cast to its dtype.

    ``load_format``: ``auto`` reads ``config.model_path``; ``dummy`` makes random weights from ``seed``. Raises WeightLoadError listing every
    missing, unexpected and mis-shaped tensor at once.
    """
    targets = list(_targets(model))
    if load_format == "dummy":
        recipe = WeightRecipe.for_family(config.family, config.hidden_size, config.tie_word_embeddings)
        for target in _progress(targets, "random weights"):
            _place(target, recipe.make(seed, target.name, target.shape))
        return
    if load_format != "auto":
        raise WeightLoadError(f"--load-format {load_format!r} is not supported; choose auto or dummy")
    folder = Path(config.model_path)
    tensors = text_tensors(find_tensors(folder))
    _drop_tied_head(tensors, config.tie_word_embeddings)
    _check_names(folder, {t.name: t for t in targets}, tensors)
    for target in _progress(targets, "loading weights"):
        _place(target, tensors[target.name].open())


def canonical_name(name: str) -> str | None:
    """Checkpoint name -> parameter path, or None for another modality's tensor or a computed buffer.

    >>> canonical_name("model.language_model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    if name.endswith(_COMPUTED_SUFFIXES) or name.removeprefix("model.").startswith(_OTHER_MODALITIES):
        return None
    for prefix, plain in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def text_tensors(found: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Tensors of the text model by parameter path. Raises WeightLoadError when two spellings name one parameter."""
    out: dict[str, TensorRef] = {}
    for name, ref in found.items():
        plain = canonical_name(name)
        if plain is None:
            continue
        if plain in out:
            raise WeightLoadError(f"tensors {out[plain].name} and {name} are the same parameter")
        out[plain] = ref
    return out


def _targets(model: nnx.Module) -> Iterator[_Target]:
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Param):
            continue
        struct = variable.get_value()
        heads, copies = variable.get_metadata().get("heads", (1, 1))
        shape = (struct.shape[0] // copies, *struct.shape[1:])
        yield _Target(".".join(map(str, path)), variable, shape, copies, heads)


def _drop_tied_head(tensors: dict[str, TensorRef], tied: bool) -> None:
    """Some exporters store the tied output table again; it is left out only when it holds the same bytes."""
    head, embed = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if not tied or head is None or embed is None or head.shape != embed.shape:
        return
    if np.array_equal(head.open().view(np.uint8), embed.open().view(np.uint8)):
        del tensors["lm_head.weight"]


def _check_names(folder: Path, wanted: Mapping[str, _Target], tensors: Mapping[str, TensorRef]) -> None:
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    wrong = [
        f"{name}: checkpoint {list(tensors[name].shape)}, model {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    if not (missing or unexpected or wrong):
        return
    lines = [f"{folder}: the weights do not fit config.json"]
    for title, items in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", wrong)):
        if items:
            more = [f"... and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
            lines.append(f"{len(items)} {title}:")
            lines += [f"  {item}" for item in [*items[:_LISTED], *more]]
    raise WeightLoadError("\n".join(lines))


def _progress(targets: list[_Target], title: str) -> Iterator[_Target]:
    """Targets in order, with a progress bar on stderr when there is much to load."""
    total = sum(t.variable.get_value().size * t.variable.get_value().dtype.itemsize for t in targets)
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=total < _PROGRESS_BYTES) as bar:
        for target in targets:
            struct = target.variable.get_value()
            yield target
            bar.update(struct.size * struct.dtype.itemsize)


def _place(target: _Target, value: np.ndarray) -> None:
    """Put ``value`` on the devices: each shard is read, replicated by heads and cast on its own."""
    struct = target.variable.get_value()
    if target.copies > 1:
        rows = target.shape[0] // target.heads
        by_head = np.asarray(value).reshape(target.heads, rows, *target.shape[1:])
        value = np.repeat(by_head, target.copies, axis=0).reshape(struct.shape)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        return np.ascontiguousarray(value[index]).astype(struct.dtype)

    target.variable.set_value(jax.make_array_from_callback(struct.shape, struct.sharding, shard))
