"""From a family's HF text config to the attention specs and pattern of its layers. One function per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_jax.srt.configs.hf_config import ConfigReader, parse_rope
from sgl_jax.srt.configs.layer_pattern import gemma_pattern, plain_pattern
from sgl_jax.srt.configs.layer_spec import AttentionSpec, LayerKind, RopeSpec


@dataclass(frozen=True, slots=True)
class FamilyShape:
    """What a family parser returns. ``swa`` is None when no layer is windowed."""

    pattern: tuple[LayerKind, ...]
    full: AttentionSpec
    swa: AttentionSpec | None
    activation: str
    tie_default: bool
    final_logit_softcap: float | None = None


def _layered_ropes(cfg: ConfigReader, defaults: Mapping[str, dict[str, Any]]) -> dict[str, RopeSpec]:
    """Ropes of ``full_attention`` and ``sliding_attention`` for the Gemma families.

    New spelling: ``rope_parameters`` keyed by layer type. Old (Gemma 3 hub): ``rope_theta`` + ``rope_scaling`` for full layers,
    ``rope_local_base_freq`` for window layers.
    """
    section = cfg.section("rope_parameters")
    if section is None:
        scaling = cfg.section("rope_scaling")
        old: dict[str, dict[str, Any]] = {
            "full_attention": dict(scaling.data) if scaling is not None else {},
            "sliding_attention": {},
        }
        for kind, key in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
            if cfg.get(key) is not None:
                old[kind]["rope_theta"] = cfg.number(key)
        section = ConfigReader(old, cfg.source, "rope_parameters.")
    if not section.data.keys() <= set(defaults):
        raise cfg.error(
            f"`rope_parameters` must be keyed by {', '.join(defaults)}, got {dict(section.data)!r}"
        )
    out = {}
    for kind, default in defaults.items():
        params = section.section(kind)
        if params is None or not params.data:
            params = ConfigReader(default, cfg.source, f"rope_parameters.{kind}.")
        out[kind] = parse_rope(params, default["rope_theta"])
    return out


def _window(cfg: ConfigReader, pattern: tuple[LayerKind, ...]) -> int | None:
    if LayerKind.SWA not in pattern:
        return None
    if cfg.get("sliding_window") is None:
        raise cfg.error("`sliding_window` is missing although the layer pattern has window layers")
    return cfg.integer("sliding_window")


def _full_kind_dims(cfg: ConfigReader, pattern: tuple[LayerKind, ...]) -> dict[LayerKind, tuple[int, int]]:
    """(kv heads, head_dim) per kind for Gemma 4, from either spelling; refuses kinds that are not uniform."""
    base = (cfg.integer("num_key_value_heads"), cfg.integer("head_dim", 256))
    per_layer = cfg.section("per_layer_config")
    dims: dict[LayerKind, tuple[int, int]] = {}
    for i, kind in enumerate(pattern):
        if per_layer is not None:
            own = per_layer.section(str(i)) or ConfigReader({}, cfg.source)
            value = (own.integer("num_key_value_heads", base[0]), own.integer("head_dim", base[1]))
        elif kind is LayerKind.FULL:
            shared = cfg.flag("attention_k_eq_v")
            heads = cfg.integer("num_global_key_value_heads", base[0]) if shared else base[0]
            value = (heads, cfg.integer("global_head_dim", 512))
        else:
            value = base
        if dims.setdefault(kind, value) != value:
            raise cfg.error(
                f"layer {i} ({kind.value}) has (kv heads, head_dim) {value}, other {kind.value} layers {dims[kind]}; "
                "layers of one kind must be alike"
            )
    return dims


def gemma4(cfg: ConfigReader) -> FamilyShape:
    """Gemma 4 text, dense: hub spelling (`global_head_dim`) and transformers' (`per_layer_config`)."""
    cfg.refuse_features(
        "gemma4",
        {
            "hidden_size_per_layer_input": "per-layer embeddings",
            "num_kv_shared_layers": "KV sharing between layers",
            "enable_moe_block": "mixture of experts",
            "use_double_wide_mlp": "double-wide MLP",
            "attention_bias": "attention bias",
        },
    )
    if cfg.get("use_bidirectional_attention", "vision") != "vision":
        raise cfg.error(
            f"`use_bidirectional_attention` = {cfg.get('use_bidirectional_attention')!r} is not supported (text is causal)"
        )
    pattern = gemma_pattern(cfg, cfg.integer("num_hidden_layers"), last_is_full=True)
    ropes = _layered_ropes(
        cfg,
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    )
    q_heads, dims, window = (
        cfg.integer("num_attention_heads"),
        _full_kind_dims(cfg, pattern),
        _window(cfg, pattern),
    )
    kv, dim = dims[LayerKind.FULL]
    full = AttentionSpec(
        q_heads, kv, dim, dim, ropes["full_attention"], 1.0, k_eq_v=cfg.flag("attention_k_eq_v")
    )
    swa = None
    if window is not None:
        kv, dim = dims[LayerKind.SWA]
        swa = AttentionSpec(q_heads, kv, dim, dim, ropes["sliding_attention"], 1.0, window=window)
    cap = cfg.optional_number("final_logit_softcapping")
    return FamilyShape(pattern, full, swa, cfg.activation("hidden_activation", "hidden_act"), True, cap)


def gemma3(cfg: ConfigReader) -> FamilyShape:
    """Gemma 3 text. Absent keys take the values of the family's published config class."""
    cfg.refuse_features(
        "gemma3",
        {"use_bidirectional_attention": "bidirectional attention", "attention_bias": "attention bias"},
    )
    pattern = gemma_pattern(cfg, cfg.integer("num_hidden_layers"), last_is_full=False)
    ropes = _layered_ropes(
        cfg,
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    )
    heads, kv = cfg.integer("num_attention_heads", 8), cfg.integer("num_key_value_heads", 4)
    dim, scale = cfg.integer("head_dim", 256), cfg.number("query_pre_attn_scalar", 256) ** -0.5
    cap, window = cfg.optional_number("attn_logit_softcapping"), _window(cfg, pattern)
    full = AttentionSpec(heads, kv, dim, dim, ropes["full_attention"], scale, soft_cap=cap)
    swa = None
    if window is not None:
        swa = AttentionSpec(
            heads, kv, dim, dim, ropes["sliding_attention"], scale, window=window, soft_cap=cap
        )
    activation = ConfigReader({"hidden_activation": "gelu_pytorch_tanh", **cfg.data}, cfg.source).activation(
        "hidden_activation"
    )
    return FamilyShape(pattern, full, swa, activation, True, cfg.optional_number("final_logit_softcapping"))


def llama_like(cfg: ConfigReader) -> FamilyShape:
    """Llama and Qwen 3: one rope, one head geometry; window layers only where the config says which."""
    cfg.refuse_features(
        str(cfg.get("model_type", "llama")), {"attention_bias": "attention bias", "mlp_bias": "MLP bias"}
    )
    pattern = plain_pattern(cfg, cfg.integer("num_hidden_layers"))
    heads = cfg.integer("num_attention_heads")
    kv = cfg.integer("num_key_value_heads", heads)
    dim = cfg.integer("head_dim", cfg.integer("hidden_size") // heads)
    params = cfg.section("rope_parameters") or cfg.section("rope_scaling") or ConfigReader({}, cfg.source)
    rope = parse_rope(params, cfg.number("rope_theta", 1e4))
    window = _window(cfg, pattern)
    full = AttentionSpec(heads, kv, dim, dim, rope, dim**-0.5)
    swa = None
    if window is not None:
        swa = AttentionSpec(heads, kv, dim, dim, rope, dim**-0.5, window=window)
    return FamilyShape(pattern, full, swa, cfg.activation("hidden_act"), False)


#: architecture name in config.json -> (family, parser)
ARCHITECTURES: dict[str, tuple[str, Callable[[ConfigReader], FamilyShape]]] = {
    "Gemma4ForConditionalGeneration": ("gemma4", gemma4),
    "Gemma4ForCausalLM": ("gemma4", gemma4),
    "Gemma3ForConditionalGeneration": ("gemma3", gemma3),
    "Gemma3ForCausalLM": ("gemma3", gemma3),
    "LlamaForCausalLM": ("llama", llama_like),
    "Qwen3ForCausalLM": ("qwen3", llama_like),
}
