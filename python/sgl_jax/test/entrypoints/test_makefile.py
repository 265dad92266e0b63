"""``make serve``: the server is make's own child, so that whoever ends make ends the server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

MAKEFILE = Path(__file__).resolve().parents[4] / "Makefile"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ending_make_serve_leaves_no_server(tmp_path):
    """The recipe's shell is replaced by the server; SIGTERM to make reaches it, and make waits for its end."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\necho $$ $PPID "$SGL_JAX_CACHE_DIR" "$@" > new && mv new started\nexec sleep 60\n'
    )
    python.chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    env = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "SGL_JAX_CACHE_DIR")
    }
    make = subprocess.Popen(["make", "serve", "ARGS=--page-size 128"], cwd=tmp_path, env=env)
    try:
        started = tmp_path / "started"
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        pid, parent, cache, *words = started.read_text().split()
        assert int(parent) == make.pid
        assert cache == str(tmp_path / ".cache")
        assert words == ["-m", "sgl_jax.tools.serve_tiny", "--", "--page-size", "128"]
        make.send_signal(signal.SIGTERM)
        make.wait(60)
        assert gone(int(pid))
    finally:
        make.kill()
