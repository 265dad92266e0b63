"""Limits of a request: sampling ranges, lengths, rank wishes. Pure functions; each raises RequestError 400 with field, value, limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.io_struct import SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing logits by it would overflow float32."""

_MAX_STOPS = 16
_MAX_BIAS = 300
_SEED_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float
    low_open: bool = False

    def check(self, name: str, value: float) -> None:
        inside = value > self.low if self.low_open else value >= self.low
        if not (math.isfinite(value) and inside and value <= self.high):
            left = "(" if self.low_open else "["
            raise RequestError(
                f"{name} is {value}, must be in {left}{self.low:g}, {self.high:g}]", param=name
            )


RANGES: dict[str, Range] = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, low_open=True),
    "min_p": Range(0, 1),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 2, low_open=True),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler said at start-up that bounds a request. ``context_len`` = prompt + output."""

    context_len: int
    max_req_input_len: int
    vocab_size: int
    dp_size: int

    @classmethod
    def from_info(cls, info: Mapping[str, Any], dp_size: int) -> Limits:
        context = int(info["context_len"])
        return cls(
            context, int(info.get("max_req_input_len") or context - 1), int(info["vocab_size"]), dp_size
        )


def check_sampling(
    params: SamplingParams, vocab_size: int, names: Mapping[str, str] = MappingProxyType({})
) -> SamplingParams:
    """Range checks; returns the params with an almost-zero temperature made greedy and the seed folded to 32 bits.

    ``names``: our field -> the client's, where an API spells one differently; messages name the client's.
    """
    for name, bounds in RANGES.items():
        bounds.check(name, getattr(params, name))
    if params.top_k != -1 and not 1 <= params.top_k < 2**31:
        raise RequestError(f"top_k is {params.top_k}, must be -1 (off) or at least 1", param="top_k")
    most = names.get("max_new_tokens", "max_new_tokens")
    least = names.get("min_new_tokens", "min_new_tokens")
    if params.max_new_tokens < 0:
        raise RequestError(f"{most} is {params.max_new_tokens}, must be at least 0", param=most)
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        raise RequestError(
            f"{least} is {params.min_new_tokens}, must be between 0 and {most} ({params.max_new_tokens})",
            param=least,
        )
    _check_stops(params, vocab_size)
    if params.temperature < GREEDY_BELOW:
        params.temperature = 0.0
    if params.seed is not None:
        if not -(2**63) <= params.seed < 2**64:
            seed = names.get("seed", "seed")
            raise RequestError(f"{seed} is {params.seed}, must fit in 64 bits", param=seed)
        params.seed = (params.seed ^ (params.seed >> 32)) & _SEED_BITS
    return params


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > _MAX_STOPS:
        raise RequestError(
            f"stop has {len(params.stop)} strings, at most {_MAX_STOPS} are allowed", param="stop"
        )
    if any(not s for s in params.stop):
        raise RequestError("stop contains an empty string; leave it out", param="stop")
    if len(params.logit_bias) > _MAX_BIAS:
        raise RequestError(
            f"logit_bias has {len(params.logit_bias)} entries, at most {_MAX_BIAS} are allowed",
            param="logit_bias",
        )
    for token, bias in params.logit_bias.items():
        Range(-100, 100).check(f"logit_bias[{token}]", bias)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", list(params.logit_bias))):
        check_token_ids(ids, vocab_size, name)


def check_token_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name}[{position}] is {token}, must be in [0, {vocab_size - 1}] (the vocabulary)",
                param=name,
            )


def check_prompt(ids: Sequence[int], limits: Limits, name: str) -> None:
    if not ids:
        raise RequestError(f"{name} is empty: at least one token is needed", param=name)
    if len(ids) > limits.max_req_input_len:
        raise RequestError(
            f"{name} has {len(ids)} tokens, the limit is {limits.max_req_input_len} "
            f"(context length {limits.context_len}; --context-length and --max-total-tokens raise it)",
            param=name,
            code="context_length_exceeded",
        )


def output_budget(prompt_len: int, wanted: int | None, default: int | None, limits: Limits, name: str) -> int:
    """Output tokens of a request. ``wanted`` None takes ``default`` (None: all there is), cut to what fits the context.

    An explicit wish that does not fit is refused, never cut.
    """
    room = limits.context_len - prompt_len
    if wanted is None:
        return max(1, room if default is None else min(default, room))
    if wanted > room:
        raise RequestError(
            f"{name} is {wanted}: with {prompt_len} prompt tokens that is {prompt_len + wanted}, the limit is the context "
            f"length {limits.context_len}; at most {room} are possible (--context-length raises it)",
            param=name,
            code="context_length_exceeded",
        )
    return wanted


def check_rank(rank: int | None, dp_size: int) -> None:
    """A client's wish for a rank (D51): refused when there is no such rank."""
    if rank is not None and not 0 <= rank < dp_size:
        raise RequestError(
            f"dp_rank is {rank}, must be in [0, {dp_size - 1}] (--dp-size {dp_size})", param="dp_rank"
        )
