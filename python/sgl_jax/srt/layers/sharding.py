"""Parameters and constraints on the ``("data", "tensor")`` mesh.

A freshly built module holds *abstract* parameters: ``jax.ShapeDtypeStruct`` with a NamedSharding. The loader replaces each by a
device array laid out that way; a preflight compiles from the abstract ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA, TENSOR = "data", "tensor"


def param(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, spec: PartitionSpec, heads: tuple[int, int] = (1, 1)
) -> nnx.Param:
    """Abstract parameter of ``shape`` laid out as ``spec``.

    ``heads`` = (heads in the checkpoint, copies of each): the loader repeats every head's rows so that each device of the tensor
    axis finds its own (KV heads fewer than the axis, DECISIONS 11). ``shape`` counts the copies.
    """
    struct = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
    return nnx.Param(struct, heads=heads)


def last_axis(vector: jax.Array, ndim: int) -> jax.Array:
    """A vector as the last axis of an ``ndim``-dimensional operand: broadcasting is explicit everywhere."""
    return jnp.expand_dims(vector, tuple(range(ndim - 1)))


def constrain(x: jax.Array, mesh: Mesh, *spec: str | None) -> jax.Array:
    """Pin the layout of an activation, e.g. ``constrain(x, mesh, "data", None, None)`` for [dp, T, H]."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
