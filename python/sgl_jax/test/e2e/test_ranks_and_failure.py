"""Two ranks on virtual devices behind the server, starts that are refused, and a scheduler that is killed."""

from __future__ import annotations

import concurrent.futures
import os
import signal

import psutil
import pytest

from sgl_jax.test.entrypoints.running import REAL, RunningServer, paused_in_decode, running

FLAGS = (
    *("--enable-unified-radix-cache", "--enable-cache-report", "--enable-metrics", "--disable-precompile"),
    *(
        "--page-size",
        "16",
        "--context-length",
        "256",
        "--max-total-tokens",
        "1536",
        "--max-running-requests",
        "8",
    ),
)
TEXT = "One day the sea was calm and the boats came home. "
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with running(REAL, *FLAGS, "--tp-size", "2", "--dp-size", "2", seconds=240) as live:
        yield live


def test_d51_rank_wishes(server):
    """D51: a rank that does not exist is 400; one that exists is what the scheduler then reports."""
    for rank in (2, 7, -1, "1", 1.5, True):
        answer = server.post("/generate", {"text": TEXT, "dp_rank": rank})
        assert answer.status_code == 400 and "dp_rank" in answer.json()["error"]["message"]
    answers = [server.generate(text=TEXT, sampling_params=GREEDY, dp_rank=rank) for rank in (0, 1)]
    assert [a["meta_info"]["dp_rank"] for a in answers] == [0, 1]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    ranks = server.client.get("/get_cache_ledger").json()["ranks"]
    assert [r["dp_rank"] for r in ranks] == [0, 1]
    assert all(r["full_tree_evictable"] > 0 for r in ranks)


def test_cache_aware_assignment_follows_the_prefix(server):
    for rank in (0, 1):
        prompt = f"{rank} only here: " + TEXT
        server.generate(text=prompt, sampling_params=GREEDY, dp_rank=rank)
        again = server.generate(text=prompt, sampling_params=GREEDY)["meta_info"]
        assert again["dp_rank"] == rank and again["cached_tokens"] > 0


def test_metrics_per_rank(server):
    text = server.client.get("/metrics").text
    for rank in (0, 1):
        assert f'sglang:cached_tokens_total{{dp_rank="{rank}",model_name="tiny"}}' in text
        assert f'sglang:max_total_num_tokens{{dp_rank="{rank}",model_name="tiny"}} 768.0' in text


def test_a_killed_scheduler_ends_the_server(server):
    """Last in this file. An open request gets its error; exit code 1, never a silent hang."""
    (child,) = [
        p for p in psutil.Process(server.process.pid).children() if "spawn_main" in " ".join(p.cmdline())
    ]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"text": TEXT, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        answer = paused_in_decode(server, pool, lambda: server.post("/generate", body))
        os.kill(child.pid, signal.SIGKILL)
        assert answer.result(60).status_code == 500
    assert server.process.wait(90) == 1
    assert "the scheduler process ended with exit code -9" in server.log()


def test_d72_a_start_that_cannot_serve_is_refused():
    """D72: no hang in warm-up; the error names the flag and the least legal value, the exit code is 1."""
    flags = ("--enable-unified-radix-cache", "--page-size", "128", "--max-total-tokens", "128")
    server = RunningServer(REAL, *flags)
    try:
        assert server.process.wait(180) == 1
        last = server.log().splitlines()[-1]
        assert "--max-total-tokens 128: " in last and "use --max-total-tokens 1024 or more" in last
    finally:
        server.kill()
