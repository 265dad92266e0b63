"""Logprobs in the two shapes of the OpenAI API."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.entrypoints.http_io import finite
from sgl_jax.srt.managers.frontend.request_state import RequestState
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager


def token_text(manager: TokenizerManager, token: int) -> str:
    """Text of one token; its id where the text alone would not tell tokens apart (half a character, no tokenizer)."""
    text = manager.decode([token])
    return text if text and "\ufffd" not in text else f"token_id:{token}"


def chat_logprobs(manager: TokenizerManager, state: RequestState, start: int) -> dict[str, Any]:
    """Chat's shape, for output tokens from ``start`` on."""
    lp = state.logprobs
    top_count = state.request.top_logprobs_num
    content = []
    for i in range(start, len(lp.output)):
        entry = _chat_entry(manager, lp.output[i], state.output_ids[i])
        top = lp.output_top[i] if top_count and i < len(lp.output_top) else []
        entry["top_logprobs"] = [_chat_entry(manager, v, t) for v, t in top[:top_count]]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(manager: TokenizerManager, value: float, token: int) -> dict[str, Any]:
    text = token_text(manager, token)
    return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}


class CompletionLogprobs:
    """Completion's shape, piece by piece: text offsets run on over the chunks of a stream."""

    def __init__(self, manager: TokenizerManager, state: RequestState, echo: bool) -> None:
        self._manager = manager
        self._state = state
        self._echo = echo
        self._sent = 0
        self._offset = 0

    def next(self) -> dict[str, Any]:
        """Everything since the last call; the first call includes the prompt when it is echoed."""
        made: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        state, lp = self._state, self._state.logprobs
        if self._echo:
            self._echo = False
            ids = state.request.input_ids[len(state.request.input_ids) - len(lp.prompt) :]
            for i, token in enumerate(ids):
                self._add(made, token, lp.prompt[i], lp.prompt_top[i] if i < len(lp.prompt_top) else None)
        for i in range(self._sent, len(lp.output)):
            top = lp.output_top[i] if i < len(lp.output_top) else None
            self._add(made, state.output_ids[i], lp.output[i], top)
        self._sent = len(lp.output)
        return made

    def _add(self, made: dict[str, list[Any]], token: int, value: float | None, top: Any) -> None:
        text = token_text(self._manager, token)
        made["tokens"].append(text)
        made["token_logprobs"].append(finite(value))
        count = self._state.request.top_logprobs_num
        row = {token_text(self._manager, t): finite(v) for v, t in (top or [])[:count]}
        made["top_logprobs"].append(None if value is None else row or {text: finite(value)})
        made["text_offset"].append(self._offset)
        skip = self._state.request.sampling.skip_special_tokens
        self._offset += len(self._manager.decode([token], skip))
