"""Equality matrix, one rank: one test per corner (page, window); its twelve cases share one compiled worker.

A file of its own per number of ranks, so that two workers share the matrix.
"""

from __future__ import annotations

import pytest

from sgl_jax.test.managers.matrix import CORNERS, check_corner


@pytest.mark.parametrize(("page", "window"), CORNERS)
def test_every_configuration_generates_the_same(page, window):
    """D13, D16, D37, D78, D85: identical greedy ids whatever the route, overlap or chunking; books balanced after every case."""
    check_corner(page, window, 1)
