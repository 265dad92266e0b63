"""What a request must answer, from its prompt and parameters alone: no scheduler, no cache, no paging."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_jax.srt.managers.io_struct import TokenOut
from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.sizing import full_request_cap
from sgl_jax.srt.model_executor.noop_worker import hash_reference
from sgl_jax.test.managers.fuzz.config import VOCAB, FuzzConfig, LetterTokenizer
from sgl_jax.test.managers.fuzz.traffic import Submit


@dataclass
class Sent:
    """A request as its client knows it. ``forgotten``: a flush came after its end."""

    rid: str
    submit: Submit
    prompt: list[int]
    queued: int
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] | None = None
    first: TokenOut | None = None
    end: TokenOut | None = None
    aborted: bool = False
    may_abort: bool = False
    forgotten: bool = False


def check_out(config: FuzzConfig, sent: Sent, out: TokenOut) -> str | None:
    """Collect one output; what is wrong with it."""
    if sent.end is not None:
        return f"{sent.rid}: a message after the terminal one: {out}"
    if sent.first is not None and (out.cached_tokens, out.dp_rank) != (
        sent.first.cached_tokens,
        sent.first.dp_rank,
    ):
        return f"{sent.rid}: hit or rank changed from {sent.first} to {out}"
    sent.output += out.token_ids
    if out.completion_tokens != len(sent.output) or out.prompt_tokens != len(sent.prompt):
        return f"{sent.rid}: counts {out.prompt_tokens}/{out.completion_tokens}, seen {len(sent.prompt)}/{len(sent.output)}"
    if not 0 <= out.dp_rank < config.dp:
        return f"{sent.rid}: dp_rank {out.dp_rank}"
    if sent.submit.logprob:
        return _check_logprobs(sent, out)
    if out.logprobs is not None or out.input_logprobs is not None:
        return f"{sent.rid}: logprobs nobody asked for"
    return None


def _check_logprobs(sent: Sent, out: TokenOut) -> str | None:
    if not out.token_ids and out.finish is not None and out.finish.type == "abort":
        return None
    if out.logprobs is None or len(out.logprobs) != len(out.token_ids):
        return f"{sent.rid}: {len(out.token_ids)} tokens with logprobs {out.logprobs}"
    if sent.submit.top:
        tops = out.top_logprobs
        if tops is None or [top[0][1] for top in tops] != out.token_ids or any(len(top) != 2 for top in tops):
            return f"{sent.rid}: top logprobs {tops} for {out.token_ids}"
    if out.input_logprobs is None:
        return None
    start = sent.submit.logprob_start
    if sent.input_logprobs is not None or start < 0:
        return f"{sent.rid}: prompt logprobs twice or unasked"
    sent.input_logprobs = out.input_logprobs
    shape = [None if at == 0 else -1.0 for at in range(start, len(sent.prompt))]
    if out.input_logprobs != shape:
        return f"{sent.rid}: {len(out.input_logprobs)} prompt logprobs from {start} for {len(sent.prompt)} tokens"
    if sent.submit.top:
        tops_in = out.input_top_logprobs or []
        ids = [None if top is None else top[0][1] for top in tops_in]
        if ids != [None if at == 0 else sent.prompt[at] for at in range(start, len(sent.prompt))]:
            return f"{sent.rid}: prompt top logprobs are about other tokens"
    return None


def cached_bound(config: FuzzConfig, sent: Sent, out: TokenOut, peers: Iterable[Sent]) -> str | None:
    """0 <= hit < prompt, whole pages, and no longer than what some earlier request of the rank and namespace computed."""
    hit = out.cached_tokens
    if hit == 0 or sent.forgotten:  # the flush that drained its last step is answered before its last output
        return None
    if not config.radix:
        return f"{sent.rid}: a hit of {hit} without a radix cache"
    if hit < 0 or hit >= len(sent.prompt) or hit % config.page:
        return f"{sent.rid}: a hit of {hit} for {len(sent.prompt)} tokens, page {config.page}"
    if sent.submit.logprob and 0 <= sent.submit.logprob_start <= hit and hit:
        return f"{sent.rid}: a hit of {hit} hides the logprob of position {sent.submit.logprob_start}"
    best = 0
    for peer in peers:
        if peer.forgotten or peer.submit.extra_key != sent.submit.extra_key:
            continue
        best = max(best, _common(sent.prompt, peer.prompt + peer.output))
        if best >= hit:
            return None
    return f"{sent.rid}: a hit of {hit}, but nobody of its namespace computed more than {best} of its tokens"


def _common(a: list[int], b: list[int]) -> int:
    for at, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return at
    return min(len(a), len(b))


def longest_output(config: FuzzConfig, prompt: int, wanted: int) -> int:
    """The request's limit after clipping to context and FULL pool."""
    fits = floor_page(config.full_tokens, config.page) - config.page - prompt
    return max(0, min(wanted, config.context - prompt, fits))


def _stop_index(config: FuzzConfig, sent: Sent) -> int | None:
    """Index of the output token that stops the request, None when none does."""
    submit = sent.submit
    ends = set(submit.stop_ids) | (set() if submit.ignore_eos else set(config.eos_ids))
    for at, token in enumerate(sent.output):
        if at + 1 < submit.min_new:
            continue
        if token in ends:
            return at
        if not submit.stop:
            continue
        if LetterTokenizer().decode(sent.output[: at + 1]).endswith(submit.stop):
            return at
    return None


def check_end(config: FuzzConfig, sent: Sent, out: TokenOut, *, shut: bool) -> str | None:
    """The terminal message: its tokens are the device's own, and the reason is the right one."""
    assert out.finish is not None
    window = config.window if config.hybrid else None
    if sent.output and sent.output != hash_reference(sent.prompt, len(sent.output), VOCAB, window):
        return f"{sent.rid}: tokens {sent.output} are not what the device generates for the prompt alone"
    kind, submit = out.finish.type, sent.submit
    limit = longest_output(config, len(sent.prompt), submit.max_new)
    stop = _stop_index(config, sent)
    if kind == "abort":
        return _check_abort(config, sent, out, stop, limit, shut)
    if sent.aborted:
        return f"{sent.rid}: aborted by its client, but it ended with {kind}"
    if submit.logprob and submit.logprob_start >= 0 and sent.input_logprobs is None:
        return f"{sent.rid}: prompt logprobs never came"
    if kind == "stop":
        return (
            None
            if stop == len(sent.output) - 1
            else f"{sent.rid}: stopped at {len(sent.output)}, expected index {stop}"
        )
    if stop is not None or len(sent.output) != limit:
        return f"{sent.rid}: ended by length at {len(sent.output)}, limit {limit}, stop index {stop}"
    return None


def _check_abort(
    config: FuzzConfig, sent: Sent, out: TokenOut, stop: int | None, limit: int, shut: bool
) -> str | None:
    assert out.finish is not None
    status, message, prompt = out.finish.status, out.finish.message, len(sent.prompt)
    if (stop is not None and stop < len(sent.output) - 1) or len(sent.output) > limit:
        return f"{sent.rid}: aborted after {len(sent.output)} tokens, limit {limit}, stop index {stop}"
    if status == 0:
        return None if sent.aborted or sent.may_abort else f"{sent.rid}: aborted by nobody: {message}"
    if status == 400:
        bad = sent.submit.bad or prompt >= config.context
        bad = bad or full_request_cap(prompt, 1, config.rules) > config.full_tokens
        bad = bad or (config.chunk < 0 and prompt > config.step_limit) or (config.hybrid and config.tight)
        if config.hybrid and config.chunk < 0:
            bad = bad or ceil_page(prompt, config.page) + config.page > config.swa_tokens
        return None if bad else f"{sent.rid}: refused although it fits: {message}"
    if "shutting down" in message:
        return None if shut else f"{sent.rid}: {message}"
    if "queue is full" in message:
        full = config.max_queued is not None and sent.queued >= config.max_queued
        return None if full else f"{sent.rid}: {message}"
    if not config.tight:  # alone on its rank, an accepted request can always go on
        return f"{sent.rid}: prompt {prompt}, {len(sent.output)} tokens out: {message}"
    return None
