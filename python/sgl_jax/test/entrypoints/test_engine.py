"""The engine answers what /generate answers, and ends its process."""

from __future__ import annotations

import pytest

from sgl_jax.srt.entrypoints.engine import Engine
from sgl_jax.srt.entrypoints.launcher import ServerFailed
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.test.entrypoints.fake_scheduler import run_fake_scheduler
from sgl_jax.test.entrypoints.running import GEMMA4

GREEDY = {"temperature": 0, "max_new_tokens": 6}


def crash(args, recv_addr, send_addr):
    raise RuntimeError("cannot start")


def test_engine():
    engine = Engine(model_path=str(GEMMA4), scheduler=run_fake_scheduler)
    try:
        assert engine.generate("hello world", GREEDY)["text"] == "hello"
        batch = engine.generate(["hello", "world"], GREEDY)
        assert [item["index"] for item in batch] == [0, 1]
        assert engine.generate(input_ids=[87, 84], sampling_params={"max_new_tokens": 2})["output_ids"] == [
            87,
            84,
        ]
        assert [part["text"] for part in engine.stream("hello", GREEDY)][-1] == "hello"
        left = engine.stream("hello", {"max_new_tokens": 200, "ignore_eos": True})
        assert next(left)["output_ids"]
        left.close()
        with pytest.raises(RequestError, match="temperature is -1"):
            engine.generate("x", {"temperature": -1.0})
        assert engine.flush_cache(timeout=10)["success"] is True
        info = engine.get_server_info()
        assert info["internal_states"][0]["running"] == 0
        assert info["arguments"]["context_length"] == {"value": 256, "source": "model", "note": "config.json"}
        process = engine._launcher.process
    finally:
        engine.shutdown()
        engine.shutdown()
    assert process.exitcode == 0


def test_a_scheduler_that_cannot_start_raises_with_its_traceback():
    with pytest.raises(ServerFailed, match="RuntimeError: cannot start"):
        Engine(model_path=str(GEMMA4), scheduler=crash)
