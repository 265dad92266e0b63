"""A server in a subprocess, for tests that need real sockets, signals and exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "refs"
GEMMA4 = FIXTURES / "gemma4-tiny"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RunningServer:
    """``module`` is run with ``-m``; stdout and stderr go to a log that :meth:`log` returns."""

    def __init__(self, module: str, *flags: str, model: Path = GEMMA4) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        descriptor, name = tempfile.mkstemp(prefix="server-", suffix=".log")
        self._log = Path(name)
        command = [sys.executable, "-m", module, "--model-path", str(model), "--port", str(self.port)]
        command += ["--served-model-name", "tiny", *flags]
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=descriptor, stderr=subprocess.STDOUT, env=env)
        os.close(descriptor)
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def wait_ready(self, seconds: float) -> RunningServer:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/ready").status_code == 200:
                    return self
            time.sleep(0.1)
        raise RuntimeError(f"not ready after {seconds} s:\n{self.log()}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def generate(self, **body: Any) -> Any:
        answer = self.post("/generate", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def terminate(self, seconds: float = 60) -> int:
        """SIGTERM and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Ends the server whatever its state. Idempotent."""
        self.client.close()
        self._log.unlink(missing_ok=True)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@contextlib.contextmanager
def running(module: str, *flags: str, seconds: float = 150, model: Path = GEMMA4) -> Iterator[RunningServer]:
    server = RunningServer(module, *flags, model=model)
    try:
        yield server.wait_ready(seconds)
    finally:
        server.kill()


FAKE = "sgl_jax.test.entrypoints.fake_server"
REAL = "sgl_jax.launch_server"
