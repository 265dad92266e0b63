"""Base class for ``unittest`` style tests, at the path where such tests look for it."""

from __future__ import annotations

import os
import unittest
from collections.abc import Callable
from typing import Any


class CustomTestCase(unittest.TestCase):
    """A TestCase that repeats a failing test method ``SGL_JAX_TEST_MAX_RETRY`` times (default 0: a failure is a failure)."""

    def _callTestMethod(self, method: Callable[[], Any]) -> None:
        retries = int(os.environ.get("SGL_JAX_TEST_MAX_RETRY", "0"))
        for left in range(retries, -1, -1):
            try:
                method()
                return
            except unittest.SkipTest:
                raise
            except Exception:
                if left == 0:
                    raise
