"""``POST /generate``: SGLang's own API, with cumulative text in streams and logprobs in ``meta_info``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from sgl_jax.srt.entrypoints.http_io import (
    EventStream,
    StrictModel,
    finite,
    json_response,
    parse_body,
    refuse_unknown_fields,
    sse,
    while_connected,
)
from sgl_jax.srt.entrypoints.sequences import LogprobWish, Prompt, new_rid, open_sequences
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.request_state import RequestState, TopLogprobs
from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()

DEFAULT_MAX_NEW_TOKENS = 128

_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "image_data": (None, []),
    "audio_data": (None, []),
    "video_data": (None, []),
    "input_embeds": (None, []),
    "lora_path": (None, "", []),
    "return_hidden_states": (None, False),
    "return_text_in_logprobs": None,
    "token_ids_logprob": (None, []),
    "modalities": (None, []),
    "custom_logit_processor": (None,),
    "session_params": (None, {}),
    "log_metrics": None,
    "priority": (None, 0),
    "background": (None, False),
}
_NEUTRAL_SAMPLING: dict[str, tuple[Any, ...] | None] = {
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, [], ""),
    "spaces_between_special_tokens": (None, True),
    "no_stop_trim": (None, False),
    "custom_params": (None, {}),
    "stream_interval": (None, 1),
}


class NativeSampling(StrictModel):
    """``sampling_params`` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None


class GenerateBody(StrictModel):
    """Exactly one of ``text`` and ``input_ids``; a list of texts, or of id lists, is a batch."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool = False
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    extra_key: str | list[str] | None = None
    dp_rank: int | list[int] | None = None
    data_parallel_rank: int | list[int] | None = None


def parse_logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """JSON keys are strings; token ids are meant."""
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError:
        raise RequestError("logit_bias: keys must be token ids", param="logit_bias") from None


def _sampling(body: NativeSampling) -> SamplingParams:
    refuse_unknown_fields(body, _NEUTRAL_SAMPLING)
    if body.max_new_tokens is None:
        ceiling = max(DEFAULT_MAX_NEW_TOKENS, body.min_new_tokens)
    else:
        ceiling = body.max_new_tokens
    return SamplingParams(
        max_new_tokens=ceiling,
        min_new_tokens=body.min_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        stop=[body.stop] if isinstance(body.stop, str) else list(body.stop or ()),
        stop_token_ids=list(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        seed=body.sampling_seed,
        logit_bias=parse_logit_bias(body.logit_bias),
    )


def _item(value: Any, index: int, size: int, name: str) -> Any:
    """Entry of a field that is one value for the batch or a list with one entry per prompt."""
    if not isinstance(value, list):
        return value
    if len(value) != size:
        raise RequestError(f"{name} has {len(value)} entries for {size} prompts", param=name)
    return value[index]


async def _prompt_ids(manager: TokenizerManager, body: GenerateBody) -> tuple[list[list[int]], bool]:
    """Token ids per prompt, and whether the body is a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", param="text")
    if body.text is not None:
        texts = body.text if isinstance(body.text, list) else [body.text]
        ids = [await manager.encode(t, "text") for t in texts]
        batch = isinstance(body.text, list)
    else:
        given: list[Any] = body.input_ids or []
        batch = bool(given) and isinstance(given[0], list)
        ids = given if batch else [given]
    if not ids:
        raise RequestError("text is an empty list: at least one prompt is needed", param="text")
    return ids, batch


async def _prompts(manager: TokenizerManager, body: GenerateBody) -> tuple[list[Prompt], bool]:
    ids, batch = await _prompt_ids(manager, body)
    size = len(ids)
    if body.dp_rank is not None and body.data_parallel_rank is not None:
        raise RequestError("give one of dp_rank and data_parallel_rank", param="dp_rank")
    rank = body.dp_rank if body.dp_rank is not None else body.data_parallel_rank
    made = []
    for i in range(size):
        sampling = _item(body.sampling_params, i, size, "sampling_params") or NativeSampling()
        rid = _item(body.rid, i, size, "rid")
        if rid == "":
            raise RequestError("rid is '', must not be empty; leave it out to get one", param="rid")
        if rid is None or (isinstance(body.rid, str) and size > 1):
            rid = new_rid() if rid is None else f"{rid}_{i}"
        start = _item(body.logprob_start_len, i, size, "logprob_start_len")
        top = _item(body.top_logprobs_num, i, size, "top_logprobs_num") or 0
        if not 0 <= top <= 128:
            raise RequestError(f"top_logprobs_num is {top}, must be in [0, 128]", param="top_logprobs_num")
        made.append(
            Prompt(
                ids=ids[i],
                sampling=_sampling(sampling),
                rid=rid,
                max_tokens=sampling.max_new_tokens,
                default_max_tokens=max(DEFAULT_MAX_NEW_TOKENS, sampling.min_new_tokens),
                n=sampling.n,
                logprobs=LogprobWish(
                    bool(_item(body.return_logprob, i, size, "return_logprob")),
                    -1 if start is None else start,
                    top,
                ),
                extra_key=_item(body.extra_key, i, size, "extra_key"),
                dp_rank=_item(rank, i, size, "dp_rank"),
                name="text" if body.text is not None else "input_ids",
                limit_name="max_new_tokens",
                names={"seed": "sampling_seed"},
            )
        )
    return made, batch or any(p.n > 1 for p in made)


def _finish(state: RequestState) -> dict[str, Any] | None:
    finish = state.finish
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": state.completion_tokens}
    return {"type": finish.type, "message": finish.message or "aborted"}


def _logprob_rows(
    manager: TokenizerManager, values: list[Any], ids: list[int], texts: bool
) -> list[tuple[float | None, int, str | None]]:
    return [(finite(v), t, manager.decode([t]) if texts else None) for v, t in zip(values, ids)]


def _top_rows(manager: TokenizerManager, rows: list[Any], texts: bool) -> list[Any]:
    def one(row: TopLogprobs | None) -> Any:
        if row is None:
            return None
        return [(finite(v), t, manager.decode([t]) if texts else None) for v, t in row]

    return [one(row) for row in rows]


def meta_info(manager: TokenizerManager, state: RequestState, texts: bool = False) -> dict[str, Any]:
    """``meta_info`` of an answer, as SGLang spells it; ``dp_rank`` is the one the scheduler observed."""
    meta: dict[str, Any] = {
        "id": state.rid,
        "finish_reason": _finish(state),
        "prompt_tokens": state.prompt_tokens,
        "completion_tokens": state.completion_tokens,
        "cached_tokens": state.cached_tokens,
        "e2e_latency": state.latency,
        "dp_rank": state.dp_rank,
        "num_retractions": state.retractions,
    }
    request = state.request
    if not request.return_logprob:
        return meta
    lp = state.logprobs
    prompt_ids = request.input_ids[len(request.input_ids) - len(lp.prompt) :]
    meta["input_token_logprobs"] = _logprob_rows(manager, lp.prompt, prompt_ids, texts)
    meta["output_token_logprobs"] = _logprob_rows(manager, lp.output, state.output_ids, texts)
    if request.top_logprobs_num:
        meta["input_top_logprobs"] = _top_rows(manager, lp.prompt_top, texts)
        meta["output_top_logprobs"] = _top_rows(manager, lp.output_top, texts)
    return meta


def answer(manager: TokenizerManager, state: RequestState, texts: bool = False) -> dict[str, Any]:
    """Everything so far: cumulative text and ids."""
    return {
        "text": state.text(),
        "output_ids": list(state.output_ids),
        "meta_info": meta_info(manager, state, texts),
    }


async def stream(manager: TokenizerManager, body: GenerateBody) -> AsyncGenerator[dict[str, Any], None]:
    """The parts of a streamed answer, with cumulative text; those of a batch carry their ``index``."""
    refuse_unknown_fields(body, _NEUTRAL)
    prompts, batch = await _prompts(manager, body)
    texts = bool((body.model_extra or {}).get("return_text_in_logprobs"))
    async with await open_sequences(manager, prompts, True, _group(body)) as opened:
        async for index in opened.news():
            item = answer(manager, opened.states[index], texts)
            yield {**item, "index": index} if batch else item


async def _events(parts: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    try:
        async for part in parts:
            yield sse(part)
    finally:
        await parts.aclose()


async def generate(manager: TokenizerManager, body: GenerateBody) -> Any:
    """The whole answer of a request that is not streamed: one object, or a list for a batch."""
    refuse_unknown_fields(body, _NEUTRAL)
    prompts, batch = await _prompts(manager, body)
    texts = bool((body.model_extra or {}).get("return_text_in_logprobs"))
    async with await open_sequences(manager, prompts, False, _group(body)) as opened:
        states = await opened.finish()
        items = [answer(manager, s, texts) for s in states]
    return [{**item, "index": i} for i, item in enumerate(items)] if batch else items[0]


def _group(body: GenerateBody) -> str | None:
    return body.rid if isinstance(body.rid, str) else None


@router.api_route("/generate", methods=["POST", "PUT"])
async def generate_route(request: Request) -> Response:
    manager: TokenizerManager = request.app.state.manager
    body = await parse_body(request, GenerateBody)
    if not body.stream:
        return json_response(await while_connected(request, generate(manager, body)))
    return EventStream(_events(stream(manager, body)))
