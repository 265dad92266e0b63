"""Gemma 3 and Gemma 4 text models: sandwich norms, scaled tied embedding, window and full layers."""

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.configs.layer_spec import LayerKind
from sgl_jax.srt.layers.attention.backend import LayerKV
from sgl_jax.srt.layers.attention.metadata import AttentionMetadata
from sgl_jax.srt.layers.mlp import GatedMLP
from sgl_jax.srt.layers.norm import RMSNorm
from sgl_jax.srt.layers.sharding import last_axis, param
from sgl_jax.srt.models.decoder import AttentionStyle, BuildContext, CausalLM, RopeTables, SelfAttention


class GemmaLayer(nnx.Module):
    """``x += post(attn(pre(x))); x += post(mlp(pre(x)))``, Gemma 4 then scales x by a learned scalar.

    Gemma 3 norms multiply by ``1 + w`` and have no value norm; Gemma 4 norms multiply by ``w``.
    """

    def __init__(self, ctx: BuildContext, kind: LayerKind) -> None:
        cfg, mesh = ctx.config, ctx.mesh
        gemma4 = cfg.family == "gemma4"

        def norm() -> RMSNorm:
            return RMSNorm(mesh, cfg.hidden_size, cfg.dtype, cfg.rms_norm_eps, zero_centred=not gemma4)

        self.input_layernorm = norm()
        self.self_attn = SelfAttention(
            ctx, kind, AttentionStyle(qk_norm=True, zero_centred=not gemma4, v_norm=gemma4)
        )
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(mesh, cfg.hidden_size, cfg.intermediate_size, cfg.activation, cfg.dtype)
        self.post_feedforward_layernorm = norm()
        self.scaled = gemma4
        if gemma4:
            self.layer_scalar = param(mesh, (1,), cfg.dtype, P())

    def __call__(
        self, x: jax.Array, rope: RopeTables, cache: LayerKV, meta: AttentionMetadata
    ) -> tuple[jax.Array, LayerKV]:
        attn, cache = self.self_attn(self.input_layernorm(x), rope, cache, meta)
        x = x + self.post_attention_layernorm(attn)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return (x * last_axis(self.layer_scalar[...], x.ndim) if self.scaled else x), cache


class GemmaForCausalLM(CausalLM):
    """Gemma 3 (``gemma3``) and Gemma 4 (``gemma4``) text."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__(
            ctx,
            GemmaLayer,
            zero_centred=ctx.config.family == "gemma3",
            embed_scale=ctx.config.hidden_size**0.5,
        )
