"""Typed messages between the front end (HTTP, tokenizer, detokenizer) and the scheduler, sent as msgpack over ZeroMQ.

Every message is a tagged ``msgspec.Struct``; :func:`encode` and :func:`decode` are the only codec. Requests that expect an answer carry
``req_id``; the scheduler echoes it in :class:`Reply`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Resolved sampling parameters of one sequence (validated by the front end; see docs/serving-api.md).

    ``temperature`` 0 is greedy. ``top_k`` -1 is off. ``stop_token_ids`` are in addition to the model's EOS ids, which
    ``ignore_eos`` disables. ``seed`` None: drawn by the scheduler from its own seed.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logit_bias: dict[int, float] = {}


class GenerateReq(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. ``n`` > 1 and lists are expanded by the front end. ``dp_rank`` is a validated wish.

    ``logprob_start_len``: first prompt position whose logprob is wanted; -1 = output tokens only.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    extra_key: str | None = None
    dp_rank: int | None = None
    received_at: float = 0.0


class AbortReq(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Abort one request, or all. Idempotent; ``req_id`` empty when nobody waits for the answer (client disconnect)."""

    rid: str = ""
    abort_all: bool = False
    req_id: str = ""


class ControlReq(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """A control call: ``kind`` is one of flush_cache, internal_state, load, ledger, pause, continue, health.

    ``args`` by kind: flush_cache {timeout: seconds}; pause {mode: abort | retract | in_place}.
    """

    kind: str
    req_id: str
    args: dict[str, Any] = {}


class ShutdownReq(msgspec.Struct, tag=True, kw_only=True):
    """Stop: finish what runs when ``drain``, else abort it; then exit 0."""

    drain: bool = True


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``type`` is stop, length or abort. ``matched``: stop string or token id. ``message`` and ``status`` (HTTP) for abort."""

    type: str
    matched: int | str | None = None
    message: str = ""
    status: int = 0


class TokenOut(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one request. ``finish`` None while it runs. Counts are cumulative; ``cached_tokens`` is the hit at first admission.

    ``logprobs`` [n], ``top_logprobs`` [n][k] of (logprob, id) for the new tokens; ``input_*`` sent once, with the first output, for the prompt
    positions from ``logprob_start_len`` on (the first prompt token has None).
    """

    rid: str
    token_ids: list[int]
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    dp_rank: int = 0
    retractions: int = 0
    queue_time: float = 0.0
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[float, int]]] | None = None
    input_logprobs: list[float | None] | None = None
    input_top_logprobs: list[list[tuple[float, int]] | None] | None = None


class TokenBatch(msgspec.Struct, tag=True, kw_only=True):
    """Outputs of one processed step."""

    outs: list[TokenOut]


class Reply(msgspec.Struct, tag=True, kw_only=True):
    """Answer to a request with ``req_id``. ``ok`` False: ``data["message"]`` says why."""

    req_id: str
    ok: bool
    data: dict[str, Any]


class Heartbeat(msgspec.Struct, tag=True, kw_only=True):
    """Sent by the scheduler loop about once a second, also while idle; ``stats`` feeds the metrics (docs/metrics.md).

    ``stats``: {"ranks": [per-rank gauges], "counters": {name: monotonic total or per-rank list}, ...}.
    """

    loop_count: int
    busy: bool
    stats: dict[str, Any] = {}


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """Sent once, after warm-up: resolved capacities, route and limits for the front end.

    ``info``: max_total_num_tokens, swa_max_total_num_tokens, per-rank capacities, context_len, max_req_input_len, route, vocab_size, plan.
    """

    info: dict[str, Any]


class Fatal(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """The scheduler died: the traceback, for the log. The front end exits non-zero.

    ``mistake``: a flag or a checkpoint that it cannot start with; ``traceback`` is then the whole message, and no traceback.
    """

    traceback: str
    mistake: bool = False


ToScheduler = GenerateReq | AbortReq | ControlReq | ShutdownReq
ToFrontEnd = TokenBatch | Reply | Heartbeat | Ready | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
_to_front_end = msgspec.msgpack.Decoder(ToFrontEnd)


def encode(message: ToScheduler | ToFrontEnd) -> bytes:
    return _encoder.encode(message)


def decode_to_scheduler(data: bytes) -> ToScheduler:
    return _to_scheduler.decode(data)


def decode_to_front_end(data: bytes) -> ToFrontEnd:
    return _to_front_end.decode(data)
