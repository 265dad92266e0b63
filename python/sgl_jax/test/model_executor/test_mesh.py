"""Mesh construction: shapes, and errors that say which flag to change."""

import jax
import pytest

from sgl_jax.srt.model_executor.mesh import MeshError, make_mesh, tensor_axis_size


@pytest.mark.parametrize(("tp", "dp", "tensor"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (8, 8, 1)])
def test_tensor_axis(tp, dp, tensor):
    assert tensor_axis_size(tp, dp) == tensor


def test_sizes_that_do_not_divide():
    with pytest.raises(MeshError, match=r"--dp-size 3 does not divide --tp-size 4 .*--dp-size \[1, 2, 4\]"):
        tensor_axis_size(4, 3)
    with pytest.raises(MeshError, match="--dp-size 0 must both be at least 1"):
        tensor_axis_size(4, 0)


def test_one_device_mesh():
    mesh = make_mesh()
    assert dict(mesh.shape) == {"data": 1, "tensor": 1}


def test_too_few_devices():
    have = len(jax.devices())
    with pytest.raises(
        MeshError,
        match=rf"--tp-size 64 needs 64 devices, cpu has {have}; .*xla_force_host_platform_device_count=64",
    ):
        make_mesh(64)


def test_missing_platform():
    with pytest.raises(MeshError, match=r"--device tpu: JAX finds no such device here.*--device cpu"):
        make_mesh(device="tpu")
