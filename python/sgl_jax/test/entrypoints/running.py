"""A server in a subprocess, for tests that need real sockets, signals and exit codes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "refs"
GEMMA4 = FIXTURES / "gemma4-tiny"


def free_port() -> int:
    """A port for a server that is about to start, left in TIME_WAIT.

    So the kernel gives it to nobody else for a minute, while the server, with SO_REUSEADDR, may bind it.
    """
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client.connect(listener.getsockname())
        listener.accept()[0].close()  # this side first: the one that closes first keeps the port
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


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

    def live(self) -> list[dict[str, Any]]:
        """The real scheduler's requests: waiting and running. Asks again while it is in a step that compiles."""
        state: dict[str, Any] = {}
        while "requests" not in state:
            state = self.client.get("/get_server_info").json()["internal_states"][0]
        requests: list[dict[str, Any]] = state["requests"]
        return requests

    def load(self) -> dict[str, Any]:
        """Rank 0 of ``/get_load``."""
        load: dict[str, Any] = self.client.get("/get_load").json()[0]
        return load

    def pause(self, mode: str) -> httpx.Response:
        return self.post("/pause_generation", {"mode": mode})

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


def paused_in_decode(
    server: RunningServer, pool: concurrent.futures.Executor, ask: Callable[[], Any]
) -> concurrent.futures.Future[Any]:
    """Runs ``ask``, which sends one request to an idle real server, and pauses that in place in the middle of its decode.

    It queues while generation is paused and then gets a moment at a time, so that it is caught however slow this process is.
    """
    while True:
        server.pause("in_place")
        answer = pool.submit(ask)
        wait_until(server.live)
        while (requests := server.live()) and not requests[0]["output_tokens"]:
            server.post("/continue_generation", {})
            server.pause("in_place")
        if requests:
            return answer
        answer.result(60)  # it ended within one moment: once more


FAKE = "sgl_jax.test.entrypoints.fake_server"
REAL = "sgl_jax.launch_server"
