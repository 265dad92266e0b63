"""A model as pure functions over a flat list of parameter arrays: what the runner compiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax import nnx

from sgl_jax.srt.layers.attention.backend import LayerKV
from sgl_jax.srt.models.decoder import CausalLM
from sgl_jax.srt.models.inputs import ModelInputs

Params = list[jax.Array]
KVLayers = tuple[LayerKV, ...]


@dataclass(frozen=True, slots=True)
class ModelFunctions:
    """Pure functions over parameters ``p`` and per-layer KV arrays ``kv``.

    ``hidden(p, ModelInputs, kv) -> (hidden [dp, T, H], kv)``; ``logits(p, hidden [dp, R, H]) -> float32 [dp, R, V]``.
    """

    hidden: Callable[[Params, ModelInputs, KVLayers], tuple[jax.Array, KVLayers]]
    logits: Callable[[Params, jax.Array], jax.Array]
    vocab_size: int


def functional(model: CausalLM) -> tuple[ModelFunctions, Params]:
    """Split ``model`` into functions and parameters. A plain list of arrays keeps the per-step dispatch cheap."""
    graph, state = nnx.split(model)
    params, treedef = jax.tree.flatten(state)

    def merged(values: Params) -> CausalLM:
        rebuilt: CausalLM = nnx.merge(graph, jax.tree.unflatten(treedef, values))
        return rebuilt

    return (
        ModelFunctions(
            hidden=lambda p, inputs, kv: merged(p).hidden_states(inputs, kv),
            logits=lambda p, hidden: merged(p).logits(hidden),
            vocab_size=model.config.vocab_size,
        ),
        params,
    )
