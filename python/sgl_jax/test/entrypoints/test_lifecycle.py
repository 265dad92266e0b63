"""Keys, start, drain, crash, stuck loop: real processes and exit codes."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import socket
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from sgl_jax.launch_server import main
from sgl_jax.srt.entrypoints.http_server import bind
from sgl_jax.srt.server_args import ServerArgs, ServerArgsError
from sgl_jax.test.entrypoints.running import FAKE, GEMMA4, REAL, RunningServer, running, wait_until
from sgl_jax.tools import serve_tiny


def test_key_drain_and_exit_0():
    """401 without the key, health and metrics exempt; SIGTERM finishes what runs, takes nothing new, exits 0."""
    with running(FAKE, "--api-key", "secret") as server:
        for path in ("/health", "/ready", "/health_generate"):
            assert server.client.get(path).status_code == 200
        assert server.client.get("/metrics").status_code == 404  # not enabled
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}):
            answer = server.client.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        server.client.headers["Authorization"] = "Bearer secret"
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/get_cache_ledger").status_code == 403
        assert server.client.get("/get_server_info").json()["api_key"] == "***"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            body = {"text": "hello", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
            answer = pool.submit(server.post, "/generate", {**body, "extra_key": "halt"})
            wait_until(lambda: server.load()["num_reqs"] == 1)
            server.process.terminate()
            wait_until(lambda: server.client.get("/ready").json()["status"] == "draining")
            assert server.post("/generate", {"text": "x"}).status_code == 503
            # Halted after its first token, so that it could not end before all this was seen.
            server.post("/continue_generation", {})
            assert answer.result(60).json()["meta_info"]["completion_tokens"] == 200
        assert server.process.wait(90) == 0


def test_a_crash_ends_every_request_and_the_server():
    """Streams get an error event, plain requests a 500; exit code 1, the traceback in the log."""
    with running(FAKE, "--skip-server-warmup") as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        held = pool.submit(server.post, "/generate", {"text": "x", "extra_key": "hold"})
        wait_until(lambda: server.load()["num_reqs"] == 1)
        open_stream = {"text": "hello", "stream": True, "extra_key": "halt"}
        with server.client.stream("POST", "/generate", json=open_stream) as stream:
            lines = filter(None, stream.iter_lines())
            assert json.loads(next(lines).removeprefix("data: "))["output_ids"] == [2]
            crash = pool.submit(server.post, "/generate", {"text": "x", "extra_key": "crash"})
            error, done = lines
        assert "scheduler has died" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert held.result(60).status_code == 500
        assert crash.result(60).status_code == 500
        assert server.process.wait(90) == 1
        assert "RuntimeError: the fake scheduler was asked to crash" in server.log()
        assert "Traceback (most recent call last)" in server.log()


def test_a_stuck_loop_ends_the_server():
    """D76: no heartbeat for --watchdog-timeout; requests get an error, exit code 1."""
    with running(FAKE, "--skip-server-warmup", "--watchdog-timeout", "4") as server:
        assert server.post("/generate", {"text": "x", "extra_key": "stuck"}).status_code == 500
        assert server.process.wait(90) == 1
        assert "--watchdog-timeout 4" in server.log()


def test_a_taken_port_is_refused_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerArgsError, match=f"--port {port}: cannot listen on 127.0.0.1:{port}"):
            bind(ServerArgs(model_path="m", port=port))


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("/nowhere", (), "--model-path /nowhere: is not a folder"),
        (str(GEMMA4.parent), (), "holds no config.json"),
        (str(GEMMA4), ("--page-size", "0"), "--page-size 0: must be >= 1"),
        (str(GEMMA4), ("--hicache-storage", "file"), "--hicache-storage file: refused"),
    ],
)
def test_bad_starts_exit_2_with_the_remedy(model, flags, said, capsys, monkeypatch):
    monkeypatch.delenv("SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE", raising=False)
    assert main(["--model-path", model, *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def model(tmp_path):
    """A copy of the checkpoint, to be spoilt."""
    return Path(shutil.copytree(GEMMA4, tmp_path / "model"))


def spoil(model: Path, **keys) -> Path:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return path


def test_a_bad_configuration_exits_2_at_once(model, capsys):
    """Read before any process starts; one line names file, key and value, or the flag."""
    path = spoil(model, architectures=["OtherForCausalLM"])
    assert main(["--model-path", str(model)]) == 2
    assert f"{path}: `architectures` is ['OtherForCausalLM']" in capsys.readouterr().err
    path.write_text('{"architectures":')
    assert main(["--model-path", str(model)]) == 2
    assert f"{path} cannot be read as JSON" in capsys.readouterr().err
    assert serve_tiny.main(["--model", str(model)]) == 2
    assert f"serve: error: {path} cannot be read as JSON" in capsys.readouterr().err
    assert main(["--model-path", str(GEMMA4), "--context-length", "10m"]) == 2
    assert "--context-length 10000000 is outside 1..4096" in capsys.readouterr().err


def test_weights_that_do_not_fit_exit_1_with_the_whole_list(model):
    """The scheduler finds it; the log has its message once, complete, and no traceback."""
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    lost = sorted(tensors)[:3]
    save_file({name: value for name, value in tensors.items() if name not in lost}, weights)
    server = RunningServer(REAL, "--max-total-tokens", "512", "--disable-precompile", model=model)
    try:
        assert server.process.wait(150) == 1
        log = server.log()
        assert "cannot start: " in log and "Traceback" not in log
        assert [log.count(name) for name in lost] == [1, 1, 1]
    finally:
        server.kill()


def test_sigterm_while_starting_exits_0():
    server = RunningServer(FAKE)
    try:
        wait_until(lambda: "Started server process" in server.log(), 90)
        assert server.terminate(90) == 0
    finally:
        server.kill()
