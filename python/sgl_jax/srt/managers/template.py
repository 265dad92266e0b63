"""Chat messages -> token ids, through the tokenizer's Jinja template."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.tokenizer import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their content as one string, in the shape that templates expect.

    Raises RequestError 400 naming the message and the part: unknown role, content that is not text.
    """
    if not messages:
        raise RequestError("messages is empty: at least one message is needed", param="messages")
    return [_plain(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _plain(message: dict[str, Any], name: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(
            f"{name}.role is {role!r}, must be one of {', '.join(_ROLES)}", param=name + ".role"
        )
    if message.get("tool_calls"):
        raise RequestError(f"{name}.tool_calls: tool calls are not supported", param=name + ".tool_calls")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part, f"{name}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        shown = type(content).__name__
        raise RequestError(
            f"{name}.content is {shown}, must be a string or a list of parts", param=name + ".content"
        )
    return {**message, "content": content}


def _text_of(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(f"{name} has type {kind!r}: only text parts are supported", param=name)
    return str(part["text"])


def render_chat(
    tokenizer: Tokenizer | None,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    extra: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation. The template writes the special tokens itself, so none are added when encoding.

    ``extra`` are the client's ``chat_template_kwargs``. Raises RequestError 400: no tokenizer, no template, or the template's
    own complaint (such as roles that must alternate).
    """
    if tokenizer is None:
        raise RequestError(
            "messages: the server runs without a tokenizer (--skip-tokenizer-init)", param="messages"
        )
    plain = plain_messages(messages)
    if not tokenizer.chat_template:
        raise RequestError(
            "messages: this model has no chat template; start with --chat-template FILE or use /v1/completions",
            param="messages",
        )
    try:
        text = tokenizer.apply_chat_template(
            plain,
            **(extra or {}),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except Exception as error:  # jinja runs the model's template: whatever it raises is about these messages
        raise RequestError(f"messages: the chat template refused them: {error}", param="messages") from error
    return tokenizer.encode(str(text), add_special_tokens=False)
