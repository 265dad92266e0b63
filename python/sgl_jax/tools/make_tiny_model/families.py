"""config.json and tensor shapes of each tiny family: hidden 64, ffn 128, vocabulary 384, 4096 positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOCAB, HIDDEN, FFN, POSITIONS = 384, 64, 128, 4096
DEFAULT_WINDOW = 32
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """``build(layers, window)`` -> (config, tensor shapes by HF name)."""

    layers: int
    windowed: bool
    build: Callable[[int, int], tuple[dict[str, Any], Shapes]]


def _layer_types(layers: int) -> list[str]:
    """[S, S, F] tiled; the last layer is always full."""
    types = ["full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(layers)]
    types[-1] = "full_attention"
    return types


def _base(architecture: str, model_type: str, layers: int, eps: float, tied: bool) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "attention_bias": False,
        "bos_token_id": 2,
        "dtype": "float32",
        "eos_token_id": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": POSITIONS,
        "model_type": model_type,
        "num_hidden_layers": layers,
        "pad_token_id": 0,
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
        "vocab_size": VOCAB,
    }


def _attention(prefix: str, heads: int, kv_heads: int, dim: int, v_proj: bool, qk_norm: bool) -> Shapes:
    shapes: Shapes = {
        f"{prefix}.q_proj.weight": (heads * dim, HIDDEN),
        f"{prefix}.k_proj.weight": (kv_heads * dim, HIDDEN),
        f"{prefix}.o_proj.weight": (HIDDEN, heads * dim),
    }
    if v_proj:
        shapes[f"{prefix}.v_proj.weight"] = (kv_heads * dim, HIDDEN)
    if qk_norm:
        shapes |= {f"{prefix}.q_norm.weight": (dim,), f"{prefix}.k_norm.weight": (dim,)}
    return shapes


def _block(prefix: str, norms: tuple[str, ...]) -> Shapes:
    return {
        **{f"{prefix}.{norm}.weight": (HIDDEN,) for norm in norms},
        f"{prefix}.mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, FFN),
    }


def _ends(tied: bool) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return shapes if tied else {**shapes, "lm_head.weight": (VOCAB, HIDDEN)}


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _gemma4(layers: int, window: int) -> tuple[dict[str, Any], Shapes]:
    types = _layer_types(layers)
    config = {
        **_base("Gemma4ForCausalLM", "gemma4_text", layers, 1e-6, tied=True),
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": types,
        "num_attention_heads": 8,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": window,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": VOCAB,
    }
    shapes = _ends(tied=True)
    for i, kind in enumerate(types):
        prefix, full = f"model.layers.{i}", kind == "full_attention"
        dims = (8, 2, 32) if full else (8, 4, 16)
        shapes |= _block(prefix, _GEMMA_NORMS) | {f"{prefix}.layer_scalar": (1,)}
        shapes |= _attention(f"{prefix}.self_attn", *dims, v_proj=not full, qk_norm=True)
    return config, shapes


def _gemma3(layers: int, window: int) -> tuple[dict[str, Any], Shapes]:
    types = _layer_types(layers)
    config = {
        **_base("Gemma3ForCausalLM", "gemma3_text", layers, 1e-6, tied=True),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": window,
    }
    shapes = _ends(tied=True)
    for i in range(layers):
        prefix = f"model.layers.{i}"
        shapes |= _block(prefix, _GEMMA_NORMS)
        shapes |= _attention(f"{prefix}.self_attn", 4, 1, 16, v_proj=True, qk_norm=True)
    return config, shapes


def _plain(
    architecture: str, model_type: str, layers: int, extra: dict[str, Any]
) -> tuple[dict[str, Any], Shapes]:
    eps = extra.pop("rms_norm_eps")
    config = {
        **_base(architecture, model_type, layers, eps, tied=False),
        "head_dim": 16,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **extra,
    }
    shapes = _ends(tied=False)
    for i in range(layers):
        prefix = f"model.layers.{i}"
        shapes |= _block(prefix, ("input_layernorm", "post_attention_layernorm"))
        shapes |= _attention(f"{prefix}.self_attn", 4, 2, 16, v_proj=True, qk_norm=model_type == "qwen3")
    return config, shapes


def _llama(layers: int, window: int) -> tuple[dict[str, Any], Shapes]:
    extra = {"rms_norm_eps": 1e-5, "mlp_bias": False, "rope_theta": 1e4}
    return _plain("LlamaForCausalLM", "llama", layers, extra)


def _qwen3(layers: int, window: int) -> tuple[dict[str, Any], Shapes]:
    extra = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": None, "use_sliding_window": False}
    return _plain("Qwen3ForCausalLM", "qwen3", layers, extra)


FAMILIES: dict[str, TinyFamily] = {
    "gemma4": TinyFamily(6, True, _gemma4),
    "gemma3": TinyFamily(6, True, _gemma3),
    "llama": TinyFamily(4, False, _llama),
    "qwen3": TinyFamily(4, False, _qwen3),
}
