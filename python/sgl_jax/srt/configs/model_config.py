"""``ModelConfig``: everything the server knows about a checkpoint before it touches a weight.

Read by pools, sizing, caches, layers and the API. Pure Python: importing it does not import JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_jax.srt.configs.families import ARCHITECTURES, FamilyShape
from sgl_jax.srt.configs.hf_config import ConfigReader, ModelConfigError, read_json
from sgl_jax.srt.configs.layer_spec import AttentionSpec, LayerKind

__all__ = ["AttentionSpec", "LayerKind", "ModelConfig", "ModelConfigError", "TokenIds"]

_DTYPES = ("float32", "bfloat16", "float16")
_NOT_TEXT_OVERRIDES = frozenset({"dtype", "context_length"})


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Special ids. ``eos``: union of config.json and generation_config.json, in that order."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only text model.

    ``layer_pattern`` has one LayerKind per layer; ``full`` and ``swa`` describe the kinds (``swa`` is None for plain models).
    ``dtype`` is the compute and weight dtype's name. ``context_len`` <= the checkpoint's ``max_position_embeddings``.
    """

    family: str
    architecture: str
    model_path: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    context_len: int
    layer_pattern: tuple[LayerKind, ...]
    full: AttentionSpec
    swa: AttentionSpec | None
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    final_logit_softcap: float | None
    tokens: TokenIds
    hf_config: Mapping[str, Any] = field(repr=False, compare=False, hash=False)

    @classmethod
    def from_path(cls, path: str | Path, override_args: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read ``path/config.json`` (and generation_config.json when there).

        ``override_args``: ``dtype`` ("auto" = the checkpoint's), ``context_length``, or any key of the text config, e.g.
        ``{"sliding_window": 160}``. Raises ModelConfigError by name for anything that cannot be served.
        """
        folder = Path(path)
        generation = folder / "generation_config.json"
        return cls.from_hf_dict(
            read_json(folder / "config.json"),
            model_path=str(folder),
            generation=read_json(generation) if generation.exists() else {},
            override_args=override_args,
        )

    @classmethod
    def from_hf_dict(
        cls,
        raw: Mapping[str, Any],
        model_path: str = "",
        generation: Mapping[str, Any] | None = None,
        override_args: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """As :meth:`from_path`, from dicts already read."""
        overrides = {k: v for k, v in (override_args or {}).items() if v is not None}
        source = str(Path(model_path) / "config.json") if model_path else "config.json"
        top = ConfigReader(raw, source)
        architecture, family, parse = _architecture(top)
        text = _text_config(top, overrides)
        _refuse_quantization(top, text)
        shape: FamilyShape = parse(text)
        return cls(
            family=family,
            architecture=architecture,
            model_path=model_path,
            dtype=_dtype(top, text, overrides.get("dtype", "auto")),
            vocab_size=text.integer("vocab_size", 262208 if family == "gemma3" else None),
            hidden_size=text.integer("hidden_size"),
            intermediate_size=text.integer("intermediate_size"),
            context_len=_context_len(text, family, overrides.get("context_length")),
            layer_pattern=shape.pattern,
            full=shape.full,
            swa=shape.swa,
            rms_norm_eps=text.number("rms_norm_eps", 1e-6),
            activation=shape.activation,
            tie_word_embeddings=text.flag(
                "tie_word_embeddings", top.flag("tie_word_embeddings", shape.tie_default)
            ),
            final_logit_softcap=shape.final_logit_softcap,
            tokens=_token_ids(top, text, ConfigReader(generation or {}, "generation_config.json")),
            hf_config=dict(raw),
        )

    # -- layers ------------------------------------------------------------------------------------------------------

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_pattern)

    @property
    def is_hybrid_swa(self) -> bool:
        """Has window layers, hence two pools."""
        return LayerKind.SWA in self.layer_pattern

    @property
    def sliding_window(self) -> int | None:
        """``W``: keys a query of a window layer sees, itself included; None for plain models."""
        return self.swa.window if self.swa is not None else None

    @property
    def swa_attention_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_pattern) if kind is LayerKind.SWA]

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_pattern) if kind is LayerKind.FULL]

    def spec(self, kind: LayerKind) -> AttentionSpec:
        """Attention of a kind that occurs in the pattern."""
        if kind is LayerKind.FULL:
            return self.full
        if self.swa is None:
            raise ModelConfigError(f"{self.family} has no window layers")
        return self.swa

    def layer_spec(self, layer_id: int) -> AttentionSpec:
        return self.spec(self.layer_pattern[layer_id])

    # -- heads (FULL layers, the reads of the cache builder; window layers via ``swa``) ------------------------------------

    @property
    def head_dim(self) -> int:
        """K head dimension of FULL layers."""
        return self.full.head_dim

    @property
    def num_attention_heads(self) -> int:
        return self.full.num_q_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.full.num_kv_heads

    def get_num_kv_heads(self, tensor_parallel_size: int) -> int:
        """KV heads of FULL layers on one device of a tensor axis of that size (at least 1: heads are replicated)."""
        return self.full.kv_heads_stored(tensor_parallel_size) // tensor_parallel_size

    def get_total_num_kv_heads_with_replication(
        self, tensor_parallel_size: int, kind: LayerKind = LayerKind.FULL
    ) -> int:
        """KV heads a pool of ``kind`` holds over the whole axis: what ``head_num`` / ``swa_head_num`` of the pools get."""
        return self.spec(kind).kv_heads_stored(tensor_parallel_size)

    def check_tensor_parallel(self, tensor_size: int) -> None:
        """Raise ModelConfigError unless every split of the model divides over a tensor axis of ``tensor_size``."""
        for kind in dict.fromkeys(self.layer_pattern):
            spec = self.spec(kind)
            if spec.num_q_heads % tensor_size:
                raise ModelConfigError(
                    f"{spec.num_q_heads} query heads do not divide over a tensor axis of {tensor_size} "
                    "(--tp-size / --dp-size); choose a divisor"
                )
            try:
                spec.kv_heads_stored(tensor_size)
            except ValueError as error:
                raise ModelConfigError(f"{kind.value} layers: {error}") from None
        if self.intermediate_size % tensor_size:
            raise ModelConfigError(
                f"intermediate_size {self.intermediate_size} does not divide over a tensor axis of {tensor_size}"
            )


def _architecture(top: ConfigReader) -> tuple[str, str, Any]:
    names = top.get("architectures", [])
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name in ARCHITECTURES:
            return (name, *ARCHITECTURES[name])
    raise top.error(
        f"`architectures` is {names!r}, which is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
    )


def _text_config(top: ConfigReader, overrides: Mapping[str, Any]) -> ConfigReader:
    """The text part (nested for multimodal checkpoints) with overrides applied; unknown override keys are refused."""
    nested = top.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise top.error(f"`text_config` is {nested!r}, expected an object")
    text = dict(nested) if nested is not None else dict(top.data)
    for key, value in overrides.items():
        if key in _NOT_TEXT_OVERRIDES:
            continue
        if key not in text:
            raise ModelConfigError(
                f"override `{key}` = {value!r}: no such key in {top.source}; known: {', '.join(sorted(text))}"
            )
        text[key] = value
    return ConfigReader(text, top.source)


def _refuse_quantization(top: ConfigReader, text: ConfigReader) -> None:
    for cfg in (top, text):
        quant = cfg.get("quantization_config")
        if quant:
            method = quant.get("quant_method") if isinstance(quant, dict) else quant
            raise cfg.error(
                f"`quantization_config` ({method!r}) is not supported; use an unquantised checkpoint"
            )


def _dtype(top: ConfigReader, text: ConfigReader, wanted: str) -> str:
    if wanted != "auto":
        if wanted not in _DTYPES:
            raise ModelConfigError(f"--dtype is {wanted!r}, supported: auto, {', '.join(_DTYPES)}")
        return wanted
    keys = ("dtype", "torch_dtype")
    found = next((c.get(k) for c in (text, top) for k in keys if c.get(k) is not None), "bfloat16")
    if found not in _DTYPES:
        raise top.error(f"`dtype` is {found!r}, supported: {', '.join(_DTYPES)}; pass --dtype")
    return str(found)


def _context_len(text: ConfigReader, family: str, wanted: int | None) -> int:
    limit = text.integer("max_position_embeddings", 131072 if family.startswith("gemma") else None)
    if wanted is None:
        return limit
    if wanted < 1 or wanted > limit:
        raise ModelConfigError(
            f"--context-length {wanted} is outside 1..{limit} (`max_position_embeddings` of the checkpoint)"
        )
    return wanted


def _token_ids(top: ConfigReader, text: ConfigReader, generation: ConfigReader) -> TokenIds:
    order = (text, top, generation)
    eos = [token for cfg in order for token in cfg.token_ids("eos_token_id")]

    def first(key: str) -> int | None:
        return next((ids[0] for cfg in order if (ids := cfg.token_ids(key))), None)

    return TokenIds(first("bos_token_id"), tuple(dict.fromkeys(eos)), first("pad_token_id"))
