"""One host-to-device copy per step: a tree of 32-bit arrays travels as one ``[ranks, N]`` int32 array.

``pack`` copies the leaves into a fresh buffer, so a launched step never sees a later change of the scheduler's arrays (D33), and
``unpack`` cuts the buffer apart again inside the jitted step, where the cuts are static and fuse away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class PackSpec:
    """Static description of a packed tree: structure, and (shape without the rank axis, dtype name) per leaf. Hashable."""

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def width(self) -> int:
        return sum(int(np.prod(shape, dtype=np.int64)) for shape, _ in self.leaves)


def pack(tree: Any) -> tuple[np.ndarray, PackSpec]:
    """``(buffer [ranks, N] int32, spec)``. Every leaf is a numpy array ``[ranks, ...]`` of a 32-bit dtype.

    Raises:
        TypeError: a leaf is not 32 bits wide.
    """
    leaves, treedef = jax.tree.flatten(tree)
    for leaf in leaves:
        if leaf.dtype.itemsize != 4:
            raise TypeError(f"packed leaves must be 32-bit, got {leaf.dtype} {leaf.shape}")
    spec = PackSpec(treedef, tuple((leaf.shape[1:], leaf.dtype.name) for leaf in leaves))
    ranks = leaves[0].shape[0]
    buffer = np.empty((ranks, spec.width), np.int32)
    at = 0
    for leaf in leaves:
        flat = leaf.reshape(ranks, -1).view(np.int32)
        buffer[:, at : at + flat.shape[1]] = flat
        at += flat.shape[1]
    return buffer, spec


def unpack(buffer: jax.Array, spec: PackSpec) -> Any:
    """Inverse of :func:`pack` on the device; traced."""
    leaves, at = [], 0
    for shape, dtype in spec.leaves:
        size = int(np.prod(shape, dtype=np.int64))
        part = buffer[:, at : at + size].reshape(buffer.shape[0], *shape)
        if dtype != "int32":
            part = jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))
        leaves.append(part)
        at += size
    return jax.tree.unflatten(spec.treedef, leaves)
