"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from sgl_jax.srt.entrypoints.http_io import EventStream, json_response, parse_body, sse, while_connected
from sgl_jax.srt.entrypoints.openai.logprobs import chat_logprobs
from sgl_jax.srt.entrypoints.openai.protocol import NAMES, CommonBody, finish_reason, usage
from sgl_jax.srt.entrypoints.sequences import LogprobWish, Prompt, Sequences, new_rid, open_sequences
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.request_state import RequestState
from sgl_jax.srt.managers.template import render_chat
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()

MAX_TOP_LOGPROBS = 20


class ChatBody(CommonBody):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise RequestError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} differ: "
                "give one of the two",
                param="max_completion_tokens",
            )
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_name(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"


def _logprob_wish(body: ChatBody) -> LogprobWish:
    top = body.top_logprobs
    if top is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {top}, must be in [0, {MAX_TOP_LOGPROBS}]", param="top_logprobs"
            )
    return LogprobWish(bool(body.logprobs), -1, top or 0)


def _prompt(manager: TokenizerManager, body: ChatBody, rid: str) -> Prompt:
    wish = _logprob_wish(body)
    if (
        body.continue_final_message
        and body.add_generation_prompt
        and "add_generation_prompt" in body.model_fields_set
    ):
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    ids = render_chat(
        manager.tokenizer,
        body.messages,
        body.add_generation_prompt and not body.continue_final_message,
        body.continue_final_message,
        body.chat_template_kwargs,
    )
    limit = body.limit
    room = manager.require_ready().context_len
    return Prompt(
        ids=ids,
        sampling=body.sampling(room if limit is None else limit),
        rid=rid,
        max_tokens=limit,
        default_max_tokens=None,
        n=1 if body.n is None else body.n,
        logprobs=wish,
        extra_key=body.extra_key,
        dp_rank=body.dp_rank,
        name="messages",
        limit_name=body.limit_name,
        names=NAMES,
    )


def _choice(manager: TokenizerManager, body: ChatBody, index: int, state: RequestState) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": state.text(), "refusal": None},
        "logprobs": chat_logprobs(manager, state, 0) if body.logprobs else None,
        "finish_reason": finish_reason(state),
    }


async def _complete(
    manager: TokenizerManager, body: ChatBody, rid: str, head: dict[str, Any]
) -> dict[str, Any]:
    async with await open_sequences(manager, [_prompt(manager, body, rid)], False, rid) as opened:
        states = await opened.finish()
        choices = [_choice(manager, body, i, s) for i, s in enumerate(states)]
        return {**head, "choices": choices, "usage": usage(manager, states, len(states))}


class _Chunks:
    """Chunks of a stream: text and logprobs since the last one."""

    def __init__(
        self, manager: TokenizerManager, body: ChatBody, states: list[RequestState], head: dict[str, Any]
    ) -> None:
        self._manager = manager
        self._body = body
        self._states = states
        self._head = head
        self._opened = [False] * len(states)
        self._sent = [0] * len(states)
        self._logprobs_sent = [0] * len(states)

    def news(self, index: int) -> list[dict[str, Any]]:
        """An opening chunk with the role when it is the first, then at most a content chunk and the final one."""
        state = self._states[index]
        text = state.text()
        piece, self._sent[index] = text[self._sent[index] :], len(text)
        logprobs = None
        if self._body.logprobs and state.completion_tokens > self._logprobs_sent[index]:
            logprobs = chat_logprobs(self._manager, state, self._logprobs_sent[index])
            self._logprobs_sent[index] = state.completion_tokens
        made = []
        if not self._opened[index]:
            self._opened[index] = True
            made.append(self._chunk(index, {"role": "assistant", "content": ""}, None, None))
        if piece or logprobs is not None:
            made.append(self._chunk(index, {"content": piece}, logprobs, None))
        if state.done:
            made.append(self._chunk(index, {}, None, finish_reason(state)))
        return made

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        null_usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "choices": [choice], **null_usage}


async def _stream(
    manager: TokenizerManager, body: ChatBody, opened: Sequences, head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    async with opened:
        states = opened.states
        chunks = _Chunks(manager, body, states, head)
        async for index in opened.news():
            for chunk in chunks.news(index):
                yield sse(chunk)
        if body.include_usage:
            yield sse({**head, "choices": [], "usage": usage(manager, states, len(states))})


@router.post("/v1/chat/completions")
async def chat_route(request: Request) -> Response:
    manager: TokenizerManager = request.app.state.manager
    body = await parse_body(request, ChatBody)
    body.check(manager)
    rid = body.rid or "chatcmpl-" + new_rid()
    head = {
        "id": rid,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": manager.args.served_model_name,
    }
    if not body.stream:
        return json_response(await while_connected(request, _complete(manager, body, rid, head)))
    opened = await open_sequences(manager, [_prompt(manager, body, rid)], True, rid)
    return EventStream(_stream(manager, body, opened, head))
