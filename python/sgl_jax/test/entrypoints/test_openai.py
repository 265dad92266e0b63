"""The stock ``openai`` client works unchanged."""

from __future__ import annotations

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other/model")
    assert error.value.body["code"] == "model_not_found"


def test_chat_twice_reports_the_hit(idle, client):
    made = [client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12) for _ in range(2)]
    assert [m.choices[0].message.content for m in made] == ["user\nhi there"] * 2
    assert [m.usage.prompt_tokens_details.cached_tokens for m in made] == [0, 19]
    assert (made[0].usage.prompt_tokens, made[0].usage.completion_tokens, made[0].usage.total_tokens) == (
        20,
        12,
        32,
    )
    assert made[0].choices[0].finish_reason == "length"
    assert made[0].id.startswith("chatcmpl-")


def test_chat_stream_with_usage(idle, client):
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "user\nhi there"
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_chat_logprobs_and_n(client):
    made = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, n=2, logprobs=True, top_logprobs=2, temperature=0
    )
    assert [c.index for c in made.choices] == [0, 1]
    content = made.choices[0].logprobs.content
    assert [c.token for c in content] == ["<bos>", "<|turn>", "u"]
    assert content[2].bytes == [117] and [t.token for t in content[2].top_logprobs] == ["u", "v"]
    assert made.usage.prompt_tokens == 20 and made.usage.completion_tokens == 6
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, n=2, logprobs=True, stream=True
    )
    tokens = {0: [], 1: []}
    for chunk in stream:
        if chunk.choices[0].logprobs:
            tokens[chunk.choices[0].index] += [c.token for c in chunk.choices[0].logprobs.content]
    assert tokens == {0: ["<bos>", "<|turn>", "u"], 1: ["<bos>", "<|turn>", "u"]}


def test_chat_parts_system_and_stop(client):
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
    made = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], stop=[" the"], max_tokens=30
    )
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("user\nhi", "stop")


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("abc def", ["abc"]), (["abc def", "x"], ["abc", "x"]), ([97, 98], None), ([[97, 98], [99]], None)],
)
def test_completion_prompts(client, prompt, texts):
    made = client.completions.create(model="tiny", prompt=prompt, max_tokens=3)
    count = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [c.index for c in made.choices] == list(range(count))
    if texts:
        assert [c.text for c in made.choices] == texts
    assert made.usage.completion_tokens == 3 * count


def test_echo_with_logprobs_scores_the_prompt(client):
    made = client.completions.create(model="tiny", prompt="abc def", max_tokens=0, echo=True, logprobs=1)
    choice = made.choices[0]
    assert choice.text == "abc def" and made.usage.completion_tokens == 0
    assert choice.logprobs.tokens == ["<bos>", "ab", "c", " d", "e", "f"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert choice.logprobs.text_offset == [0, 0, 2, 3, 5, 6]
    assert choice.logprobs.top_logprobs[0] is None and choice.logprobs.top_logprobs[1] == {"ab": -1.0}


def test_completion_stream_with_echo_n_and_usage(client):
    stream = client.completions.create(
        model="tiny",
        prompt="abc def",
        max_tokens=3,
        n=2,
        echo=True,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts, tokens = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
    assert texts == {0: "abc defabc", 1: "abc defabc"}
    assert tokens[0] == tokens[1] == ["<bos>", "ab", "c", " d", "e", "f", "<bos>", "ab", "c"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6


def test_errors_arrive_as_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)


def test_sglang_extensions(client):
    made = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=5,
        extra_body={"top_k": 5, "ignore_eos": True, "min_tokens": 2, "rid": "mine"},
    )
    assert made.id == "mine"


def test_async_client_in_parallel(server):
    import asyncio

    async def many():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as made:
            calls = [
                made.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9) for _ in range(6)
            ]
            return await asyncio.gather(*calls)

    assert {m.choices[0].message.content for m in asyncio.run(many())} == {"user\nhi th"}
