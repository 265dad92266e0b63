"""Bodies of /v1/completions and /v1/chat/completions, and what they share."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.entrypoints.http_io import StrictModel, refuse_unknown_fields
from sgl_jax.srt.entrypoints.native_api import parse_logit_bias
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.request_state import RequestState
from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

# OpenAI and neighbouring servers' fields that are not implemented: values that change nothing (None: any value).
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": None,
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "regex": (None,),
    "json_schema": (None,),
    "ebnf": (None,),
    "lora_path": (None, ""),
    "no_stop_trim": (None, False),
    "return_hidden_states": (None, False),
    "separate_reasoning": None,
    "stream_reasoning": None,
    "use_beam_search": (None, False),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "priority": (None, 0),
    "add_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
}


NAMES = {"min_new_tokens": "min_tokens"}
"""Sampling fields that this API spells its own way, for messages."""


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class CommonBody(StrictModel):
    """Fields of both endpoints; the second block are SGLang's extensions."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    rid: str | None = None
    extra_key: str | None = None
    dp_rank: int | None = None

    def check(self, manager: TokenizerManager) -> None:
        """Unknown model (404), unknown fields and ``stream_options`` without ``stream`` (400)."""
        check_model(manager, self.model)
        refuse_unknown_fields(self, NEUTRAL)
        if self.stream_options is not None:
            refuse_unknown_fields(self.stream_options, {})
            if not self.stream:
                raise RequestError("stream_options is only allowed with stream: true", param="stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, ceiling: int) -> SamplingParams:
        """``ceiling``: the output limit that ``min_tokens`` is checked against."""

        def pick(value: Any, default: Any) -> Any:
            return default if value is None else value

        return SamplingParams(
            max_new_tokens=ceiling,
            min_new_tokens=pick(self.min_tokens, 0),
            temperature=pick(self.temperature, 1.0),
            top_p=pick(self.top_p, 1.0),
            top_k=pick(self.top_k, -1),
            min_p=pick(self.min_p, 0.0),
            frequency_penalty=pick(self.frequency_penalty, 0.0),
            presence_penalty=pick(self.presence_penalty, 0.0),
            repetition_penalty=pick(self.repetition_penalty, 1.0),
            stop=[self.stop] if isinstance(self.stop, str) else list(self.stop or ()),
            stop_token_ids=list(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=pick(self.skip_special_tokens, True),
            seed=self.seed,
            logit_bias=parse_logit_bias(self.logit_bias),
        )


def check_model(manager: TokenizerManager, model: str | None) -> None:
    """404 in OpenAI's form for a model that is not served. A body without ``model`` means the one there is."""
    served = manager.args.served_model_name
    if model is not None and model != served:
        raise RequestError(
            f"The model `{model}` does not exist. Served here: `{served}`", 404, "model", "model_not_found"
        )


def finish_reason(state: RequestState) -> str | None:
    return None if state.finish is None else state.finish.type


def usage(manager: TokenizerManager, states: list[RequestState], n: int) -> dict[str, Any]:
    """Token counts of a request: prompts once, not once per choice. ``cached_tokens`` with --enable-cache-report."""
    prompt = sum(s.prompt_tokens for s in states[::n])
    output = sum(s.completion_tokens for s in states)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    if manager.args.enable_cache_report:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(s.cached_tokens for s in states[::n])}
    return counts
