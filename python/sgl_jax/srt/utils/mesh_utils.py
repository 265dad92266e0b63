"""Device meshes by parallelism per axis, in the signature of the seam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def create_device_mesh(
    ici_parallelism: Sequence[int],
    dcn_parallelism: Sequence[int],
    devices: Sequence[Any] | None = None,
    device_indexes: Sequence[int] | None = None,
    num_slices: int = 1,
    allow_split_physical_axes: bool = True,
    use_explicit_sharding: bool = False,
    mesh_axes: Sequence[str] = ("data", "tensor"),
) -> Mesh:
    """Mesh of shape ``ici_parallelism * dcn_parallelism``, axis by axis; one ``-1`` in each takes what is left.

    ``ici_parallelism`` splits the devices of a slice, ``dcn_parallelism`` the ``num_slices`` slices. ``device_indexes`` picks
    devices of ``devices`` (default: all). Axes are Auto, which ``shard_map`` needs, unless ``use_explicit_sharding``.

    Raises ValueError that names the axis counts, the devices and what would fit.
    """
    chosen = list(jax.devices() if devices is None else devices)
    if device_indexes is not None:
        bad = [i for i in device_indexes if not 0 <= i < len(chosen)]
        if bad:
            raise ValueError(f"device_indexes {bad} are outside 0..{len(chosen) - 1}")
        chosen = [chosen[i] for i in device_indexes]
    if not len(ici_parallelism) == len(dcn_parallelism) == len(mesh_axes):
        raise ValueError(
            f"ici_parallelism {list(ici_parallelism)}, dcn_parallelism {list(dcn_parallelism)} and mesh_axes "
            f"{list(mesh_axes)} need one entry per axis"
        )
    if num_slices < 1 or len(chosen) % num_slices:
        raise ValueError(f"{len(chosen)} devices cannot be split into num_slices={num_slices}")
    ici = _fill(ici_parallelism, len(chosen) // num_slices, "ici_parallelism")
    dcn = _fill(dcn_parallelism, num_slices, "dcn_parallelism")
    axis_type = AxisType.Explicit if use_explicit_sharding else AxisType.Auto
    if num_slices > 1:
        grid = mesh_utils.create_hybrid_device_mesh(
            ici, dcn, devices=chosen, allow_split_physical_axes=allow_split_physical_axes
        )
    elif chosen[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(
            ici, devices=chosen, allow_split_physical_axes=allow_split_physical_axes
        )
    else:
        grid = np.array(chosen, dtype=object).reshape(ici)
    return Mesh(grid, tuple(mesh_axes), axis_types=(axis_type,) * len(mesh_axes))


def _fill(parallelism: Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """Replace the one -1 so that the product is ``count``."""
    shape = [int(n) for n in parallelism]
    if shape.count(-1) > 1 or any(n < 1 and n != -1 for n in shape):
        raise ValueError(f"{name} {shape} may hold one -1; all other entries must be at least 1")
    known = math.prod(n for n in shape if n != -1)
    if -1 in shape and count % known == 0:
        shape[shape.index(-1)] = count // known
    if math.prod(shape) != count or -1 in shape:
        raise ValueError(f"{name} {list(parallelism)} does not fit {count} devices or slices")
    return tuple(shape)
