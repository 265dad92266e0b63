"""Bad input is 4xx with field, value and limit; never 422, never 5xx, never a hang."""

from __future__ import annotations

import json

import pytest

CHAT = "/v1/chat/completions"
COMP = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]

# (path, body, status, a part of the message, param)
CASES = [
    ("/generate", {}, 400, "exactly one of text and input_ids", "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, 400, "exactly one", "text"),
    ("/generate", {"text": 3}, 400, "text is 3", "text"),
    ("/generate", {"text": []}, 400, "at least one prompt", "text"),
    ("/generate", {"input_ids": []}, 400, "input_ids is empty", "input_ids"),
    ("/generate", {"input_ids": [1, 999]}, 400, "input_ids[1] is 999, must be in [0, 383]", "input_ids"),
    ("/generate", {"input_ids": [-1]}, 400, "input_ids[0] is -1", "input_ids"),
    ("/generate", {"input_ids": [1.5]}, 400, "input_ids", None),
    ("/generate", {"input_ids": [2**70]}, 400, "input_ids", None),
    ("/generate", {"input_ids": [5] * 256}, 400, "256 tokens, the limit is 255", "input_ids"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"temperature": -1}},
        400,
        "temperature is -1",
        "temperature",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"temperature": "hot"}},
        400,
        "sampling_params.temperature is 'hot': Input should be a valid number",
        "sampling_params.temperature",
    ),
    (
        "/generate",
        {"text": ["a", "b"], "sampling_params": [{}, {"top_p": "x"}]},
        400,
        "sampling_params[1].top_p is 'x'",
        "sampling_params[1].top_p",
    ),
    ("/generate", {"text": "a", "rid": ""}, 400, "rid is '', must not be empty", "rid"),
    ("/generate", {"text": ["a", "b"], "rid": ["x", ""]}, 400, "rid is '', must not be empty", "rid"),
    ("/generate", {"text": ["a", "b"], "rid": ""}, 400, "rid is '', must not be empty", "rid"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"sampling_seed": 2**64}},
        400,
        "sampling_seed is 18446744073709551616, must fit in 64 bits",
        "sampling_seed",
    ),
    ("/generate", {"text": "a", "sampling_params": {"top_p": 2}}, 400, "top_p is 2", "top_p"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"max_new_tokens": 9999}},
        400,
        "context length 256",
        "max_new_tokens",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"max_new_tokens": -3}},
        400,
        "max_new_tokens is -3",
        "max_new_tokens",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"temprature": 0}},
        400,
        "did you mean temperature?",
        "temprature",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"regex": "x"}},
        400,
        "regex is 'x': not supported",
        "regex",
    ),
    ("/generate", {"text": "a", "sampling_params": {"n": 0}}, 400, "n is 0, must be in [1, 128]", "n"),
    (
        "/generate",
        {"text": "a", "sampling_params": [{}, {}]},
        400,
        "sampling_params has 2 entries for 1 prompts",
        None,
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}},
        400,
        "keys must be token ids",
        "logit_bias",
    ),
    ("/generate", {"text": "a", "dp_rank": 7}, 400, "dp_rank is 7, must be in [0, 0]", "dp_rank"),
    ("/generate", {"text": "a", "dp_rank": -1}, 400, "dp_rank is -1", "dp_rank"),
    ("/generate", {"text": "a", "dp_rank": "0"}, 400, "dp_rank", "dp_rank"),
    ("/generate", {"text": "a", "image_data": ["x"]}, 400, "image_data", "image_data"),
    ("/generate", {"text": ["a", "b"], "rid": ["x", "x"]}, 400, "rid 'x' is in use", "rid"),
    (
        "/generate",
        {"text": "a", "logprob_start_len": 99, "return_logprob": True},
        400,
        "logprob_start_len is 99",
        None,
    ),
    (
        "/generate",
        {"text": "a", "extra_key": "refuse"},
        400,
        "can never fit: 99 > 10 (--max-total-tokens)",
        None,
    ),
    ("/generate", {"text": "a", "extra_key": "refuse", "stream": True}, 400, "can never fit", None),
    (COMP, {"model": "tiny"}, 400, "prompt is missing", "prompt"),
    (COMP, {"model": "gpt-4", "prompt": "a"}, 404, "The model `gpt-4` does not exist", "model"),
    (COMP, {"model": 3, "prompt": "a"}, 400, "model is 3", "model"),
    (COMP, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens is '5'", "max_tokens"),
    (COMP, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens is -1", "max_tokens"),
    (COMP, {"prompt": "a", "max_tokens": 300}, 400, "context length 256", "max_tokens"),
    (COMP, {"prompt": "a", "n": 1000}, 400, "n is 1000", "n"),
    (COMP, {"prompt": ["a"] * 10, "n": 100}, 400, "1000 sequences", "n"),
    (COMP, {"prompt": "a", "logprobs": 99}, 400, "logprobs is 99, must be in [0, 20]", "logprobs"),
    (COMP, {"prompt": "a", "best_of": 3}, 400, "best_of is 3: not supported", "best_of"),
    (COMP, {"prompt": "a", "stop": ""}, 400, "empty string", "stop"),
    (COMP, {"prompt": "a", "seed": 2**64}, 400, "seed is 18446744073709551616", "seed"),
    (
        COMP,
        {"prompt": "a", "min_tokens": 9, "max_tokens": 3},
        400,
        "between 0 and max_tokens (3)",
        "min_tokens",
    ),
    (
        CHAT,
        {"messages": HELLO, "min_tokens": 9, "max_completion_tokens": 3},
        400,
        "min_tokens is 9, must be between 0 and max_completion_tokens (3)",
        "min_tokens",
    ),
    (COMP, {"prompt": "a", "seed": 1.5}, 400, "seed is 1.5", "seed"),
    (COMP, {"prompt": [[1], [500]]}, 400, "prompt[1][0] is 500", "prompt[1]"),
    (
        COMP,
        {"prompt": "a", "stream_options": {"include_usage": True}},
        400,
        "only allowed with stream",
        "stream_options",
    ),
    (COMP, {"prompt": "a", "stream": True, "max_tokens": 300}, 400, "context length 256", "max_tokens"),
    (CHAT, {"model": "tiny"}, 400, "messages is missing", "messages"),
    (CHAT, {"messages": []}, 400, "messages is empty", "messages"),
    (
        CHAT,
        {"messages": [{"role": "king", "content": "x"}]},
        400,
        "messages[0].role is 'king'",
        "messages[0].role",
    ),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "'image_url': only text parts",
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": "hi"}, 400, "messages is 'hi'", "messages"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools", "tools"),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_object"}},
        400,
        "response_format",
        "response_format",
    ),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs needs logprobs", "top_logprobs"),
    (
        CHAT,
        {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
        400,
        "must be in [0, 20]",
        "top_logprobs",
    ),
    (
        CHAT,
        {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4},
        400,
        "differ",
        "max_completion_tokens",
    ),
    (CHAT, {"messages": HELLO, "temperature": 1e9}, 400, "must be in [0, 100]", "temperature"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 400}]},
        400,
        "tokens, the limit is 255",
        "messages",
    ),
    ("/abort_request", {}, 400, "rid is missing", "rid"),
    ("/pause_generation", {"mode": "sometimes"}, 400, "must be one of abort, retract, in_place", "mode"),
]


@pytest.mark.parametrize(("path", "body", "status", "said", "param"), CASES)
def test_bad_bodies(server, path, body, status, said, param):
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert said in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("path", ["/generate", COMP, CHAT, "/abort_request"])
@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"nonsense",
        b"[1]",
        b'"x"',
        b'{"text": "\\ud800"}',
        b'{"text": NaN}',
        b"\xff\xfe",
        b"[" * 3000,
        b"null",
    ],
)
def test_malformed_json(server, path, raw):
    answer = server.client.post(path, content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/generate", 405), ("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("DELETE", "/health", 405)],
)
def test_unknown_routes_use_the_error_form(server, method, path, status):
    answer = server.client.request(method, path)
    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize("timeout", ["x", "-1", "nan", "inf", "1e9"])
def test_bad_flush_timeout(server, timeout):
    assert server.client.get(f"/flush_cache?timeout={timeout}").status_code == 400


def test_neutral_fields_pass(server):
    body = {
        "messages": HELLO,
        "max_tokens": 2,
        "user": "me",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    assert server.post(CHAT, body).status_code == 200
    assert (
        server.post(
            "/generate", {"text": "a", "lora_path": None, "sampling_params": {"max_new_tokens": 1}}
        ).status_code
        == 200
    )


def test_an_unknown_field_is_named(server):
    error = server.post(CHAT, {"messages": HELLO, "max_token": 3}).json()["error"]
    assert error["message"] == "max_token is not a known field (did you mean max_tokens?)"


def test_still_healthy_afterwards(server):
    assert server.client.get("/health_generate").json()["status"] == "ready"
    assert json.loads(server.client.get("/get_load").text)[0]["num_reqs"] == 0
