"""create_device_mesh: shapes, the one -1, Auto axes."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from sgl_jax.srt.utils.mesh_utils import _fill, create_device_mesh


def test_the_call_of_the_seam_gives_an_auto_mesh_over_all_devices():
    mesh = create_device_mesh(ici_parallelism=[1, -1], dcn_parallelism=[1, 1])
    assert mesh.axis_names == ("data", "tensor") and dict(mesh.shape) == {
        "data": 1,
        "tensor": jax.device_count(),
    }
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_explicit_axes_names_and_chosen_devices():
    mesh = create_device_mesh(
        [1, 1], [1, 1], device_indexes=[0], use_explicit_sharding=True, mesh_axes=["x", "y"]
    )
    assert mesh.axis_names == ("x", "y") and mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)


@pytest.mark.parametrize(
    "parallelism,count,shape",
    [([1, -1], 4, (1, 4)), ([-1, 2], 8, (4, 2)), ([2, 2], 4, (2, 2)), ([-1, 1], 1, (1, 1))],
)
def test_fill(parallelism, count, shape):
    assert _fill(parallelism, count, "ici_parallelism") == shape


@pytest.mark.parametrize(
    "parallelism,count,text",
    [
        ([-1, -1], 4, "may hold one -1"),
        ([0, 4], 4, "at least 1"),
        ([3, -1], 4, "does not fit 4"),
        ([2, 1], 4, "does not fit 4"),
    ],
)
def test_fill_refuses(parallelism, count, text):
    with pytest.raises(ValueError, match=text):
        _fill(parallelism, count, "ici_parallelism")


@pytest.mark.parametrize(
    "kwargs,text",
    [
        ({"ici_parallelism": [1], "dcn_parallelism": [1, 1]}, "one entry per axis"),
        (
            {"ici_parallelism": [1, 1], "dcn_parallelism": [1, 1], "device_indexes": [99]},
            r"\[99\] are outside",
        ),
        ({"ici_parallelism": [1, 1], "dcn_parallelism": [1, 1], "num_slices": 0}, "num_slices=0"),
    ],
)
def test_bad_arguments_are_named(kwargs, text):
    with pytest.raises(ValueError, match=text):
        create_device_mesh(**kwargs)
