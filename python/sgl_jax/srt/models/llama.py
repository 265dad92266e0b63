"""Llama and Qwen 3: pre-norm blocks; Qwen 3 adds an RMS norm on every query and key head."""

from __future__ import annotations

import jax
from flax import nnx

from sgl_jax.srt.configs.layer_spec import LayerKind
from sgl_jax.srt.layers.attention.backend import LayerKV
from sgl_jax.srt.layers.attention.metadata import AttentionMetadata
from sgl_jax.srt.layers.mlp import GatedMLP
from sgl_jax.srt.layers.norm import RMSNorm
from sgl_jax.srt.models.decoder import AttentionStyle, BuildContext, CausalLM, RopeTables, SelfAttention


class LlamaLayer(nnx.Module):
    """``x += attn(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, ctx: BuildContext, kind: LayerKind) -> None:
        cfg, mesh = ctx.config, ctx.mesh
        self.input_layernorm = RMSNorm(mesh, cfg.hidden_size, cfg.dtype, cfg.rms_norm_eps)
        self.self_attn = SelfAttention(ctx, kind, AttentionStyle(qk_norm=cfg.family == "qwen3"))
        self.post_attention_layernorm = RMSNorm(mesh, cfg.hidden_size, cfg.dtype, cfg.rms_norm_eps)
        self.mlp = GatedMLP(mesh, cfg.hidden_size, cfg.intermediate_size, cfg.activation, cfg.dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTables, cache: LayerKV, meta: AttentionMetadata
    ) -> tuple[jax.Array, LayerKV]:
        attn, cache = self.self_attn(self.input_layernorm(x), rope, cache, meta)
        x = x + attn
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class LlamaForCausalLM(CausalLM):
    """Llama (``llama``) and Qwen 3 (``qwen3``)."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(ctx, LlamaLayer)
