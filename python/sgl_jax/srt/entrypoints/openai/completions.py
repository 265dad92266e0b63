"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from sgl_jax.srt.entrypoints.http_io import EventStream, json_response, parse_body, sse, while_connected
from sgl_jax.srt.entrypoints.openai.logprobs import CompletionLogprobs
from sgl_jax.srt.entrypoints.openai.protocol import NAMES, CommonBody, finish_reason, usage
from sgl_jax.srt.entrypoints.sequences import LogprobWish, Prompt, Sequences, new_rid, open_sequences
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.request_state import RequestState
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20


class CompletionBody(CommonBody):
    """``prompt``: a string, a list of strings, token ids, or a list of token-id lists."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    max_completion_tokens: int | None = None

    @property
    def limit(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError("give one of max_tokens and max_completion_tokens", param="max_tokens")
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


async def _prompt_ids(manager: TokenizerManager, prompt: Any) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await manager.encode(prompt, "prompt")]
    if not prompt:
        raise RequestError("prompt is an empty list: at least one prompt is needed", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if isinstance(prompt[0], str):
        return [await manager.encode(p, f"prompt[{i}]") for i, p in enumerate(prompt)]
    return list(prompt)


async def _prompts(manager: TokenizerManager, body: CompletionBody, rid: str) -> list[Prompt]:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs is {body.logprobs}, must be in [0, {MAX_LOGPROBS}]", param="logprobs")
    ids = await _prompt_ids(manager, body.prompt)
    limit = body.limit
    default = max(DEFAULT_MAX_TOKENS, body.min_tokens or 0)
    start = 0 if body.echo else -1
    wish = LogprobWish(True, start, body.logprobs) if body.logprobs is not None else LogprobWish()
    return [
        Prompt(
            ids=one,
            sampling=body.sampling(default if limit is None else limit),
            rid=rid if len(ids) == 1 else f"{rid}_{i}",
            max_tokens=limit,
            default_max_tokens=default,
            n=1 if body.n is None else body.n,
            names=NAMES,
            logprobs=wish,
            extra_key=body.extra_key,
            dp_rank=body.dp_rank,
            name="prompt" if len(ids) == 1 else f"prompt[{i}]",
        )
        for i, one in enumerate(ids)
    ]


def _echoed(manager: TokenizerManager, body: CompletionBody, index: int, n: int, state: RequestState) -> str:
    """The prompt's text as it was sent; ids are decoded."""
    if not body.echo:
        return ""
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return prompt
    one = prompt if isinstance(prompt[0], int) else prompt[index // n]
    return one if isinstance(one, str) else manager.decode(state.request.input_ids)


class _Chunks:
    """Turns the news of sequences into stream chunks: text and logprobs since the last one."""

    def __init__(
        self, manager: TokenizerManager, body: CompletionBody, opened: Sequences, head: dict[str, Any]
    ) -> None:
        n = body.n or 1
        states = opened.states
        self._body = body
        self._head = head
        self._states = states
        self._sent = [0] * len(states)
        self._first = [_echoed(manager, body, i, n, s) for i, s in enumerate(states)]
        self._logprobs = [CompletionLogprobs(manager, s, bool(body.echo)) for s in states]

    def chunk(self, index: int) -> dict[str, Any] | None:
        """None when nothing became certain yet."""
        state = self._states[index]
        text = state.text()
        piece = self._first[index] + text[self._sent[index] :]
        if not piece and not state.done and self._body.logprobs is None:
            return None
        self._sent[index], self._first[index] = len(text), ""
        logprobs = self._logprobs[index].next() if self._body.logprobs is not None else None
        choice = {"index": index, "text": piece, "logprobs": logprobs, "finish_reason": finish_reason(state)}
        return {**self._head, "choices": [choice]}


async def _stream(
    manager: TokenizerManager, body: CompletionBody, opened: Sequences, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    async with opened:
        chunks = _Chunks(manager, body, opened, head)
        null_usage = {"usage": None} if body.include_usage else {}
        async for index in opened.news():
            chunk = chunks.chunk(index)
            if chunk is not None:
                yield sse({**chunk, **null_usage})
        if body.include_usage:
            yield sse({**head, "choices": [], "usage": usage(manager, opened.states, body.n or 1)})


def _answer(manager: TokenizerManager, body: CompletionBody, states: list[RequestState]) -> dict[str, Any]:
    n = body.n or 1
    choices = []
    for i, state in enumerate(states):
        logprobs = (
            CompletionLogprobs(manager, state, bool(body.echo)).next() if body.logprobs is not None else None
        )
        text = _echoed(manager, body, i, n, state) + state.text()
        choices.append(
            {"index": i, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(state)}
        )
    return {"choices": choices, "usage": usage(manager, states, n)}


async def _complete(manager: TokenizerManager, body: CompletionBody, rid: str, head: dict[str, Any]) -> Any:
    prompts = await _prompts(manager, body, rid)
    async with await open_sequences(manager, prompts, False, rid) as opened:
        return {**head, **_answer(manager, body, await opened.finish())}


@router.post("/v1/completions")
async def completions_route(request: Request) -> Response:
    manager: TokenizerManager = request.app.state.manager
    body = await parse_body(request, CompletionBody)
    body.check(manager)
    rid = body.rid or "cmpl-" + new_rid()
    head = {
        "id": rid,
        "object": "text_completion",
        "created": int(time.time()),
        "model": manager.args.served_model_name,
    }
    if not body.stream:
        return json_response(await while_connected(request, _complete(manager, body, rid, head)))
    opened = await open_sequences(manager, await _prompts(manager, body, rid), True, rid)
    return EventStream(_stream(manager, body, opened, head))
