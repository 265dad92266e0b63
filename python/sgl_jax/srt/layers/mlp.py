"""Gated feed-forward block."""

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import Mesh

from sgl_jax.srt.layers.linear import ColumnLinear, RowLinear


def activate(name: str, x: jax.Array) -> jax.Array:
    """``"silu"`` or ``"gelu_tanh"`` (ModelConfig.activation)."""
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)


class GatedMLP(nnx.Module):
    """``down(act(gate(x)) * up(x))``; x [..., hidden] -> [..., hidden]."""

    def __init__(self, mesh: Mesh, hidden: int, intermediate: int, activation: str, dtype: str) -> None:
        self.gate_proj = ColumnLinear(mesh, hidden, intermediate, dtype)
        self.up_proj = ColumnLinear(mesh, hidden, intermediate, dtype)
        self.down_proj = RowLinear(mesh, intermediate, hidden, dtype)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(activate(self.activation, self.gate_proj(x)) * self.up_proj(x))
