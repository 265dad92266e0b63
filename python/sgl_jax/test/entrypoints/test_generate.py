"""/generate: answers, batches, streams, logprobs, stops. The fake model repeats the prompt's tokens."""

from __future__ import annotations

import concurrent.futures
import itertools
import json

import pytest

from sgl_jax.test.entrypoints.running import wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 6}


def events(server, path, body, after_first=lambda: None):
    """The data lines of a stream, parsed; the last must be [DONE]. ``after_first`` is called when the first has arrived."""
    lines = []
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in filter(None, answer.iter_lines()):
            lines.append(line)
            if len(lines) == 1:
                after_first()
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_one(idle):
    first = idle.generate(text="hello world", sampling_params=GREEDY, rid="one")
    assert first["text"] == "hello"
    assert first["output_ids"] == [2, 87, 84, 91, 91, 94]
    meta = first["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "one",
        "finish_reason": {"type": "length", "length": 6},
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "cached_tokens": 0,
        "dp_rank": 0,
        "num_retractions": 0,
    }
    second = idle.generate(text="hello world", sampling_params=GREEDY)
    assert second["output_ids"] == first["output_ids"]
    assert second["meta_info"]["cached_tokens"] == 9


def test_batch_of_texts_and_ids(idle):
    answers = idle.generate(text=["ab", "cd"], sampling_params=GREEDY, rid=["x", "y"])
    assert [(a["index"], a["meta_info"]["id"]) for a in answers] == [(0, "x"), (1, "y")]
    assert [a["text"][:4] for a in answers] == ["abab", "cdcd"]
    by_ids = idle.generate(
        input_ids=[[87, 84], [91]], sampling_params=[{"max_new_tokens": 2}, {"max_new_tokens": 1}]
    )
    assert [a["output_ids"] for a in by_ids] == [[87, 84], [91]]
    assert idle.generate(input_ids=[87, 84], sampling_params={"max_new_tokens": 2})["output_ids"] == [87, 84]


def test_n_samples(idle):
    answers = idle.generate(text="ab", sampling_params={**GREEDY, "n": 3}, rid="many")
    assert [(a["index"], a["meta_info"]["id"]) for a in answers] == [
        (0, "many_0"),
        (1, "many_1"),
        (2, "many_2"),
    ]


def test_stream_is_cumulative(idle):
    parts = events(idle, "/generate", {"text": "hello world", "sampling_params": GREEDY})
    texts = [p["text"] for p in parts]
    assert texts[-1] == "hello"
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert parts[-1]["output_ids"] == [2, 87, 84, 91, 91, 94]
    assert [p["meta_info"]["finish_reason"] is None for p in parts] == [True] * (len(parts) - 1) + [False]


def test_stream_of_a_batch_carries_the_index(idle):
    parts = events(idle, "/generate", {"text": ["hello", "world"], "sampling_params": GREEDY})
    last = {p["index"]: p["text"] for p in parts}
    assert last[0] == "hello" and last[1].startswith("wor")
    assert {p["index"] for p in parts if p["meta_info"]["finish_reason"]} == {0, 1}


def test_logprobs(idle):
    body = {
        "text": "ab",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    meta = idle.generate(**body, return_text_in_logprobs=True)["meta_info"]
    ids = [row[1] for row in meta["input_token_logprobs"]]
    assert [row[0] for row in meta["input_token_logprobs"]] == [None] + [
        -float(i) for i in range(1, len(ids))
    ]
    assert ids[0] == 2 and meta["input_token_logprobs"][0][2] == "<bos>"
    assert meta["output_token_logprobs"] == [[-0.5, 2, "<bos>"], [-0.5, ids[1], "ab"]]
    assert [len(row) for row in meta["output_top_logprobs"]] == [2, 2]
    plain = idle.generate(text="ab", sampling_params={"max_new_tokens": 1}, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == [] and plain["output_token_logprobs"] == [[-0.5, 2, None]]


def test_stop_string_is_cut_and_named(idle):
    answer = idle.generate(text="hello world", sampling_params={"max_new_tokens": 50, "stop": "wor"})
    assert answer["text"] == "hello "
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wor"}
    parts = events(
        idle, "/generate", {"text": "hello world", "sampling_params": {"max_new_tokens": 50, "stop": ["wor"]}}
    )
    assert parts[-1]["text"] == "hello "
    assert all("hello ".startswith(p["text"]) for p in parts)


def test_stop_token_is_no_text_but_an_output_id(idle):
    answer = idle.generate(
        input_ids=[87, 84, 91], sampling_params={"max_new_tokens": 9, "stop_token_ids": [91]}
    )
    assert (answer["text"], answer["output_ids"]) == ("he", [87, 84, 91])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 91}


def test_zero_new_tokens_scores_only(idle):
    answer = idle.generate(
        text="ab", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]


def test_default_output_is_cut_to_the_context(idle):
    answer = idle.generate(input_ids=[87] * 200)
    assert answer["meta_info"]["completion_tokens"] == 56


def running_and_waiting(server):
    load = server.load()
    return load["num_reqs"], load["num_waiting_reqs"]


def test_a_part_arrives_before_the_next_is_made(idle):
    """The scheduler stands still after the first token until the client has seen it."""
    seen = []

    def go_on():
        seen.append(running_and_waiting(idle))
        idle.post("/continue_generation", {})

    body = {"text": "hello world", "extra_key": "halt", "sampling_params": GREEDY}
    parts = events(idle, "/generate", body, go_on)
    assert seen == [(1, 0)]
    assert parts[0]["output_ids"] == [2] and parts[0]["meta_info"]["finish_reason"] is None
    assert parts[-1]["output_ids"] == [2, 87, 84, 91, 91, 94]


def test_error_inside_a_stream_is_an_event_then_done(idle):
    """The error comes after the first part has arrived; before that it would be a plain 500."""
    body = {"text": "hello", "extra_key": "late"}
    parts = events(idle, "/generate", body, lambda: idle.post("/continue_generation", {}))
    assert parts[-1]["error"]["message"] == "out of memory"
    assert parts[0]["output_ids"] == [2]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(idle.post, "/generate", body)
        wait_until(lambda: running_and_waiting(idle) == (1, 0))
        idle.post("/continue_generation", {})
        assert answer.result(60).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_d67_full_queue_is_503_at_once(idle, stream):
    """D67: four run, two wait; every further request is refused promptly, and none stays open."""
    held = {"text": "x", "extra_key": "hold", "stream": False}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(idle.post, "/generate", {**held, "rid": f"h{stream}{i}"}) for i in range(6)]
        wait_until(lambda: running_and_waiting(idle) == (4, 2))
        refused = [idle.post("/generate", {"text": "x", "stream": stream}) for _ in range(6)]
        assert idle.post("/abort_request", {"abort_all": True}).json()["found"] is True
        answers = [w.result(60) for w in waiting]
    assert {r.status_code for r in refused} == {503}
    assert "--max-queued-requests 2" in refused[0].json()["error"]["message"]
    assert {a.json()["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}
