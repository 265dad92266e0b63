"""The skeleton all decoder-only families share: attention with optional norms, embedding, layer loop, logits.

Module attributes are named as in HF checkpoints, so a parameter's path *is* its tensor name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax import nnx
from jax.sharding import Mesh

from sgl_jax.srt.configs.layer_spec import LayerKind
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.layers.attention.backend import LayerKV, PagedAttention
from sgl_jax.srt.layers.attention.metadata import AttentionMetadata
from sgl_jax.srt.layers.embedding import Embedding
from sgl_jax.srt.layers.linear import ColumnLinear, RowLinear
from sgl_jax.srt.layers.logits import LMHead, project_logits, select_rows
from sgl_jax.srt.layers.norm import RMSNorm, rms_normalize
from sgl_jax.srt.layers.rotary import apply_rope, rope_tables
from sgl_jax.srt.layers.sharding import DATA, constrain
from sgl_jax.srt.models.inputs import ModelInputs

RopeTables = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What every module of a model is built from."""

    config: ModelConfig
    mesh: Mesh
    backend: str = "native"


@dataclass(frozen=True, slots=True)
class AttentionStyle:
    """Norms around attention heads. ``qk_norm``: learned RMS norm on every q and k head before rope, ``1 + w`` when
    ``zero_centred``. ``v_norm``: RMS norm without weight on every v head (Gemma 4)."""

    qk_norm: bool = False
    zero_centred: bool = False
    v_norm: bool = False


class SelfAttention(nnx.Module):
    """Projections, norms, rope and paged attention of one layer."""

    def __init__(self, ctx: BuildContext, kind: LayerKind, style: AttentionStyle) -> None:
        cfg, mesh = ctx.config, ctx.mesh
        spec = cfg.spec(kind)
        stored = spec.kv_heads_stored(mesh.shape["tensor"])
        copies = (spec.num_kv_heads, stored // spec.num_kv_heads)
        self.q_proj = ColumnLinear(mesh, cfg.hidden_size, spec.num_q_heads * spec.head_dim, cfg.dtype)
        self.k_proj = ColumnLinear(mesh, cfg.hidden_size, stored * spec.head_dim, cfg.dtype, copies)
        if not spec.k_eq_v:
            self.v_proj = ColumnLinear(mesh, cfg.hidden_size, stored * spec.v_head_dim, cfg.dtype, copies)
        self.o_proj = RowLinear(mesh, spec.num_q_heads * spec.v_head_dim, cfg.hidden_size, cfg.dtype)
        if style.qk_norm:
            self.q_norm = RMSNorm(mesh, spec.head_dim, cfg.dtype, cfg.rms_norm_eps, style.zero_centred)
            self.k_norm = RMSNorm(mesh, spec.head_dim, cfg.dtype, cfg.rms_norm_eps, style.zero_centred)
        self.spec, self.style, self.eps = spec, style, cfg.rms_norm_eps
        self.attend = PagedAttention(mesh, spec, ctx.backend)

    def __call__(
        self, x: jax.Array, rope: RopeTables, cache: LayerKV, meta: AttentionMetadata
    ) -> tuple[jax.Array, LayerKV]:
        """x [dp, T, hidden] -> [dp, T, hidden] and the layer's pools with the new K/V."""
        q = split_heads(self.q_proj(x), self.spec.head_dim)
        k = split_heads(self.k_proj(x), self.spec.head_dim)
        # With k_eq_v the value is the raw key: before k_norm, without rope.
        v = k if self.spec.k_eq_v else split_heads(self.v_proj(x), self.spec.v_head_dim)
        if self.style.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.style.v_norm:
            v = rms_normalize(v, self.eps).astype(v.dtype)
        out, cache = self.attend(apply_rope(q, rope), apply_rope(k, rope), v, cache, meta)
        return self.o_proj(out), cache


def split_heads(x: jax.Array, dim: int) -> jax.Array:
    """[dp, T, heads * dim] -> [dp, T, heads, dim]."""
    return x.reshape(*x.shape[:-1], -1, dim)


class Decoder(nnx.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        ctx: BuildContext,
        layer: Callable[[BuildContext, LayerKind], nnx.Module],
        zero_centred: bool,
        scale: float,
    ) -> None:
        cfg = ctx.config
        self.embed_tokens = Embedding(ctx.mesh, cfg.vocab_size, cfg.hidden_size, cfg.dtype, scale)
        self.layers = nnx.List([layer(ctx, kind) for kind in cfg.layer_pattern])
        self.norm = RMSNorm(ctx.mesh, cfg.hidden_size, cfg.dtype, cfg.rms_norm_eps, zero_centred)


class CausalLM(nnx.Module):
    """A decoder with an output table. Subclasses choose the layer class and the constants of their family."""

    def __init__(
        self,
        ctx: BuildContext,
        layer: Callable[[BuildContext, LayerKind], nnx.Module],
        zero_centred: bool = False,
        embed_scale: float = 1.0,
    ) -> None:
        cfg = ctx.config
        self.model = Decoder(ctx, layer, zero_centred, embed_scale)
        if not cfg.tie_word_embeddings:
            self.lm_head = LMHead(ctx.mesh, cfg.vocab_size, cfg.hidden_size, cfg.dtype)
        self.config, self.mesh = cfg, ctx.mesh

    def __call__(self, inputs: ModelInputs, kv: tuple[LayerKV, ...]) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """One step over all ranks.

        ``kv``: one LayerKV per layer in layer order, donated by the caller. Returns float32 logits [dp, R, vocab] of
        ``inputs.logits_rows`` and the pools with the K/V of every new token written.
        """
        hidden, kv = self.hidden_states(inputs, kv)
        return self.logits(select_rows(hidden, inputs.logits_rows)), kv

    def hidden_states(
        self, inputs: ModelInputs, kv: tuple[LayerKV, ...]
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """As ``__call__`` up to the last layer: [dp, T, hidden] before the final norm. ``logits_rows`` is not read."""
        cfg, mesh = self.config, self.mesh
        ropes = {
            kind: rope_tables(cfg.spec(kind).rope, cfg.spec(kind).head_dim, inputs.positions)
            for kind in dict.fromkeys(cfg.layer_pattern)
        }
        x = constrain(self.model.embed_tokens(inputs.input_ids), mesh, DATA, None, None)
        new_kv = []
        for kind, layer, cache in zip(cfg.layer_pattern, self.model.layers, kv, strict=True):
            x, cache = layer(x, ropes[kind], cache, inputs.attention)
            x = constrain(x, mesh, DATA, None, None)
            new_kv.append(cache)
        return x, tuple(new_kv)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and output table: hidden [dp, R, hidden] of any rows -> float32 [dp, R, vocab]."""
        table = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return project_logits(self.model.norm(hidden), table.weight[...], self.config.final_logit_softcap)
