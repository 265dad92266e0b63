"""One front end over the fake scheduler for all tests of this folder that do not end it."""

from __future__ import annotations

import pytest

from sgl_jax.test.entrypoints.running import FAKE, running


@pytest.fixture(scope="session")
def server():
    with running(FAKE, "--enable-cache-report", "--enable-metrics", "--max-queued-requests", "2") as live:
        yield live


@pytest.fixture
def idle(server):
    """The server with nothing running or cached."""
    assert server.client.get("/flush_cache?timeout=30").status_code == 200
    return server
