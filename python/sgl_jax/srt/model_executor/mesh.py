"""The ``(data, tensor)`` device mesh.

``--tp-size`` counts all devices, ``--dp-size`` of them are data-parallel attention ranks, so the tensor axis is
``tp_size / dp_size``. One device is a 1 x 1 mesh: the forward path is the same whatever the mesh.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"
_HOST_COUNT_FLAG = "xla_force_host_platform_device_count"


class MeshError(ValueError):
    """The mesh cannot be built; the message names flag, value, limit and remedy."""


def tensor_axis_size(tp_size: int, dp_size: int) -> int:
    """Devices per data-parallel rank.

    Raises:
        MeshError: a size is below 1, or ``dp_size`` does not divide ``tp_size``.
    """
    if tp_size < 1 or dp_size < 1:
        raise MeshError(f"--tp-size {tp_size} and --dp-size {dp_size} must both be at least 1")
    if tp_size % dp_size:
        legal = [d for d in range(1, tp_size + 1) if tp_size % d == 0]
        raise MeshError(
            f"--dp-size {dp_size} does not divide --tp-size {tp_size} (--tp-size counts all devices); "
            f"use one of --dp-size {legal}, or a multiple of {dp_size} for --tp-size"
        )
    return tp_size // dp_size


def request_cpu_devices(count: int) -> None:
    """Ask XLA for ``count`` virtual CPU devices. Legal only before the first JAX computation; later it does nothing.

    A count given by the user in ``XLA_FLAGS`` is left alone.
    """
    if count <= 1 or _HOST_COUNT_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(
        RuntimeError
    ):  # the backend is up: make_mesh reports a shortage, if there is one
        jax.config.update("jax_num_cpu_devices", count)


def pick_devices(device: str = "auto") -> list[Any]:
    """Devices of platform ``device`` ("auto" = JAX's default platform). "cpu" keeps JAX from claiming accelerators, too.

    Raises:
        MeshError: the platform has no devices here.
    """
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")  # no effect once the backends are up
    try:
        return list(jax.devices() if device == "auto" else jax.devices(device))
    except RuntimeError as error:
        raise MeshError(
            f"--device {device}: JAX finds no such device here ({error}); use --device cpu or --device auto"
        ) from error


def make_mesh(
    tp_size: int = 1, dp_size: int = 1, *, device: str = "auto", devices: Sequence[Any] | None = None
) -> Mesh:
    """Mesh of shape ``(dp_size, tp_size / dp_size)`` over the first ``tp_size`` devices.

    Raises:
        MeshError: sizes that do not divide, or too few devices.
    """
    tensor = tensor_axis_size(tp_size, dp_size)
    if devices is None:
        if device in ("auto", "cpu"):
            request_cpu_devices(tp_size)
        devices = pick_devices(device)
    if len(devices) < tp_size:
        platform = devices[0].platform if devices else device
        remedy = f"lower --tp-size to {len(devices)}"
        if platform == "cpu":
            remedy += (
                f", or start with XLA_FLAGS=--{_HOST_COUNT_FLAG}={tp_size} for that many virtual CPU devices"
            )
        raise MeshError(
            f"--tp-size {tp_size} needs {tp_size} devices, {platform} has {len(devices)}; {remedy}"
        )
    grid = np.array(list(devices)[:tp_size], dtype=object).reshape(dp_size, tensor)
    return Mesh(grid, (DATA_AXIS, TENSOR_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Shorthand for ``NamedSharding(mesh, PartitionSpec(*axes))``."""
    return NamedSharding(mesh, PartitionSpec(*axes))
