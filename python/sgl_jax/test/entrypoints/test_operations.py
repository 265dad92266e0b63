"""Health, information, flush, abort, pause, load, ledger, metrics."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket

import pytest

from sgl_jax.test.entrypoints.running import wait_until


def running_requests(server):
    return server.load()["num_reqs"]


def internal_state(server):
    return server.client.get("/get_server_info").json()["internal_states"][0]


@pytest.fixture
def held(idle):
    """A request that runs until it is aborted; yields (rid, future of its answer)."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(idle.post, "/generate", {"text": "x", "extra_key": "hold", "rid": "held"})
        wait_until(lambda: running_requests(idle) == 1)
        yield "held", answer
        idle.post("/abort_request", {"abort_all": True})
        answer.result(60)


def test_health_endpoints(server):
    for path in ("/health", "/ready", "/health_generate"):
        answer = server.client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    assert server.client.head("/health").status_code == 200


def test_model_and_server_info(server):
    info = server.client.get("/get_model_info").json()
    assert info == server.client.get("/model_info").json()
    assert (
        info["served_model_name"],
        info["context_length"],
        info["vocab_size"],
        info["has_chat_template"],
    ) == ("tiny", 256, 384, True)
    state = server.client.get("/get_server_info").json()
    assert state.keys() == server.client.get("/server_info").json().keys()
    assert state["arguments"]["max_queued_requests"] == {
        "value": 2,
        "source": "user",
        "note": "--max-queued-requests",
    }
    assert state["arguments"]["page_size"]["source"] == "default"
    assert state["arguments"]["dtype"] == {
        "value": "auto",
        "source": "default",
        "note": "",
        "effective": "float32",
    }
    assert "effective" not in state["arguments"]["chunked_prefill_size"]
    share = {"value": None, "source": "derived", "note": "bounded by nothing"}
    assert state["arguments"]["mem_fraction_static"] == share
    assert (state["max_total_num_tokens"], state["tp_size"], state["status"]) == (1000, 1, "ready")
    assert state["route"] == {"impl": "Fake", "hybrid_swa": True}
    assert state["internal_states"][0]["running"] == 0


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_d64_flush_when_idle(idle, method):
    """D64: both methods, 200 when idle; text by default, JSON on request."""
    answer = idle.client.request(method, "/flush_cache")
    assert (answer.status_code, answer.text) == (200, "Cache flushed.\n")
    asked = idle.client.request(method, "/flush_cache", headers={"Accept": "application/json"})
    assert asked.json() == {"success": True, "message": "Cache flushed.", "ranks": [{"leaked": 0}]}


def test_d64_d65_flush_when_busy_says_what_is_pending(idle, held):
    """D64, D65: 400 with the reason; with a timeout it waits for idle."""
    refused = idle.client.get("/flush_cache?format=json")
    assert refused.status_code == 400
    assert refused.json() == {
        "success": False,
        "message": "1 request(s) are not finished",
        "pending": ["held"],
    }
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(idle.client.get, "/flush_cache?timeout=50")
        wait_until(lambda: internal_state(idle)["flush_waits"])
        assert not waiting.done()
        idle.post("/abort_request", {"rid": "held"})
        assert waiting.result(60).status_code == 200


def test_d69_one_pending_flush(idle, held):
    """D69: a second flush is refused at once; expiry leaves the server working."""
    expired = idle.client.get("/flush_cache?timeout=0.3&format=json")
    assert (expired.status_code, expired.json()["pending"]) == (400, ["held"])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(idle.client.get, "/flush_cache?timeout=50")
        wait_until(lambda: internal_state(idle)["flush_waits"])
        second = idle.client.get("/flush_cache?timeout=50&format=json")
        assert (second.status_code, second.json()["message"]) == (400, "a flush is already in progress")
        assert not first.done()
        idle.post("/abort_request", {"rid": "held"})
        assert first.result(60).status_code == 200
    wait_until(lambda: running_requests(idle) == 0)
    assert idle.client.get("/flush_cache").status_code == 200


def test_abort(idle, held):
    rid, answer = held
    assert idle.post("/abort_request", {"rid": "unknown"}).json() == {"found": False, "rid": "unknown"}
    assert idle.post("/abort_request", {"rid": rid}).json() == {"found": True, "rid": rid}
    assert answer.result(60).json()["meta_info"]["finish_reason"] == {"type": "abort", "message": "aborted"}
    assert idle.post("/abort_request", {"rid": rid}).json()["found"] is False


def test_abort_by_the_name_of_a_whole_request(idle):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"text": "x", "extra_key": "hold", "rid": "group", "sampling_params": {"n": 3}}
        answer = pool.submit(idle.post, "/generate", body)
        wait_until(lambda: running_requests(idle) == 3)
        assert idle.post("/abort_request", {"rid": "group"}).json()["found"] is True
        assert [a["meta_info"]["finish_reason"]["type"] for a in answer.result(60).json()] == ["abort"] * 3


def test_a_rid_in_use_is_refused(idle, held):
    error = idle.post("/generate", {"text": "x", "rid": "held"})
    assert (error.status_code, error.json()["error"]["message"]) == (
        400,
        "rid 'held' is in use by another request",
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_d68_a_disconnect_aborts(idle, stream, path):
    """D68: the client goes before the first token, streaming or not; the scheduler is told and frees the request."""
    body = {"text": "x"} if path == "/generate" else {"messages": [{"role": "user", "content": "x"}]}
    body |= {"extra_key": "hold", "rid": f"gone-{stream}-{path}", "stream": stream}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", idle.port)) as client:
        client.sendall(head.encode() + data)
        wait_until(lambda: running_requests(idle) == 1)
    wait_until(lambda: running_requests(idle) == 0)
    assert body["rid"] in internal_state(idle)["aborted"]


def test_d68_a_disconnect_in_the_middle_of_a_stream_aborts(idle):
    body = {
        "text": "hello",
        "stream": True,
        "rid": "left",
        "extra_key": "halt",  # so that nothing but the abort can end it
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
    }
    with idle.client.stream("POST", "/generate", json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: running_requests(idle) == 0)
    info = idle.client.get("/get_server_info").json()
    assert "left" in info["internal_states"][0]["aborted"]
    assert info["open_requests"] == 0


def loop_count(server):
    return server.client.get("/health").json()["loop_count"]


def test_pause_and_continue(idle):
    assert idle.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(idle.generate, text="x", sampling_params={"max_new_tokens": 1})
        wait_until(lambda: idle.load()["num_waiting_reqs"] == 1)
        turns = loop_count(idle)
        wait_until(lambda: loop_count(idle) > turns + 2)  # turns in which it could have started
        assert idle.load()["num_waiting_reqs"] == 1 and not answer.done()
        assert idle.post("/continue_generation", {}).status_code == 200
        assert answer.result(60)["output_ids"] == [2]


def test_ledger(server):
    assert server.client.get("/get_cache_ledger").json() == {
        "internal": True,
        "route": "Fake",
        "ranks": [{"dp_rank": 0, "full_capacity": 1000}],
    }


def test_ledger_answers_who_owns_a_slot(server):
    ask = server.client.get("/get_cache_ledger?slot=17&pool=swa&rank=0").json()
    assert ask["slot"] == {"asked": {"slot": 17, "pool": "swa", "rank": 0}, "description": "free"}
    assert server.client.get("/get_cache_ledger?slot=3").json()["slot"]["asked"]["pool"] == "full"


def test_a_ledger_the_backend_lacks_is_501_in_the_one_error_form(server):
    answer = server.client.get("/get_cache_ledger?slot=501")
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert (error["message"], error["type"]) == ("this model has one KV pool", "server_error")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("slot=x", "slot is 'x', must be an integer, 0 or more"),
        ("slot=-1", "slot is '-1'"),
        ("slot=1.5", "slot is '1.5'"),
        ("slot=", "slot is ''"),
        ("slot=1&pool=both", "pool is 'both', must be one of full, swa"),
        ("slot=1&rank=1", "rank is '1', must be an integer, at most 0"),
        ("slot=1&rank=", "rank is ''"),
        ("pool=swa", "pool goes with slot"),
        ("dp_rank=0", "dp_rank is unknown; known: slot, pool, rank"),
    ],
)
def test_a_bad_question_about_a_slot_is_400(server, query, says):
    answer = server.client.get(f"/get_cache_ledger?{query}")
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (400, True)


def counter(server, name):
    text = server.client.get("/metrics").text
    return float(re.search(rf'^sglang:{name}{{dp_rank="0",model_name="tiny"}} (\S+)$', text, flags=re.M)[1])


def test_d70_d71_counters_count_once(idle):
    """D70, D71: a query and its hit count once; scraping after decode steps still shows them."""
    names = ("prompt_tokens_total", "cached_tokens_total", "generation_tokens_total", "num_requests_total")
    before = [counter(idle, n) for n in names]
    for _ in range(2):
        idle.generate(text="hello world", sampling_params={"max_new_tokens": 20, "ignore_eos": True})
    assert [counter(idle, n) - b for n, b in zip(names, before)] == [20, 9, 40, 2]
    idle.client.get("/health_generate")
    assert counter(idle, "num_requests_total") - before[3] == 2
    assert 0 < counter(idle, "cache_hit_rate") < 1
    assert counter(idle, "num_retracted_reqs") == 2
    assert counter(idle, "evicted_tokens_total") == 7
    assert counter(idle, "time_to_first_token_seconds_count") > 0
    assert idle.client.head("/metrics").status_code == 200
