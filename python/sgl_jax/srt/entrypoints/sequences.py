"""Prompts -> sequences: what every generating endpoint does between its body and its answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.frontend.limits import (
    check_prompt,
    check_rank,
    check_sampling,
    check_token_ids,
    output_budget,
)
from sgl_jax.srt.managers.frontend.request_state import RequestState
from sgl_jax.srt.managers.io_struct import GenerateReq, SamplingParams
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

MAX_SEQUENCES = 512


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """``start``: first prompt position whose logprob is wanted, -1 = output only. ``top``: alternatives per token."""

    wanted: bool = False
    start: int = -1
    top: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, with its sampling parameters before the length check.

    ``max_tokens`` None: ``default_max_tokens``, cut to the context (None: all that fits). ``name``/``limit_name`` are the
    fields that messages name; ``names`` maps sampling fields that the API spells its own way.
    """

    ids: list[int]
    sampling: SamplingParams
    rid: str
    max_tokens: int | None
    default_max_tokens: int | None
    n: int = 1
    logprobs: LogprobWish = field(default_factory=LogprobWish)
    extra_key: str | None = None
    dp_rank: int | None = None
    name: str = "prompt"
    limit_name: str = "max_tokens"
    names: Mapping[str, str] = field(default_factory=dict)


def new_rid() -> str:
    return uuid.uuid4().hex


class Sequences:
    """The open sequences of one HTTP request, in answer order: prompt by prompt, each ``n`` times.

    Leaving the context aborts whatever is not done.
    """

    def __init__(self, manager: TokenizerManager, group: str | None) -> None:
        self._manager = manager
        self._group = group
        self.states: list[RequestState] = []

    async def __aenter__(self) -> Sequences:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts whatever is not done. Idempotent."""
        for state in self.states:
            self._manager.drop(state)
        self._manager.release_group(self._group)
        self._group = None

    async def finish(self) -> list[RequestState]:
        """Waits for all. The first error ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for state in self.states:
                    group.create_task(self._manager.finish(state))
        except* RequestError as errors:
            raise errors.exceptions[0] from None
        return self.states

    async def news(self) -> AsyncIterator[int]:
        """Index of a sequence whenever it has something new, until all are done. Raises the first error."""
        if len(self.states) == 1:
            async for _ in self._manager.follow(self.states[0]):
                yield 0
            return
        waiting = {asyncio.ensure_future(s.wait()): i for i, s in enumerate(self.states)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda t: waiting[t]):
                    index = waiting.pop(task)
                    task.result()
                    if not self.states[index].done:
                        waiting[asyncio.ensure_future(self.states[index].wait())] = index
                    yield index
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def open_sequences(
    manager: TokenizerManager, prompts: Sequence[Prompt], stream: bool, rid: str | None = None
) -> Sequences:
    """Checks every prompt before the first is sent, then sends all. Raises RequestError 400/503.

    ``rid``: the client's name for the whole request, by which it can be aborted.
    """
    requests = [r for p in prompts for r in _expand(manager, p, stream)]
    if len(requests) > MAX_SEQUENCES:
        raise RequestError(
            f"the request makes {len(requests)} sequences (prompts times n), at most {MAX_SEQUENCES}",
            param="n",
        )
    group = rid if rid is not None and [r.rid for r, _ in requests] != [rid] else None
    manager.reserve([r.rid for r, _ in requests], group)
    opened = Sequences(manager, group)
    try:
        for request, drop in requests:
            opened.states.append(await manager.submit(request, drop))
    except BaseException:
        opened.close()
        raise
    return opened


def _expand(manager: TokenizerManager, prompt: Prompt, stream: bool) -> list[tuple[GenerateReq, bool]]:
    """The ``n`` sequences of a prompt as (request, drop the output?)."""
    limits = manager.require_ready()
    check_prompt(prompt.ids, limits, prompt.name)
    check_token_ids(prompt.ids, limits.vocab_size, prompt.name)
    check_rank(prompt.dp_rank, limits.dp_size)
    if prompt.sampling.stop and manager.tokenizer is None:
        raise RequestError("stop needs a tokenizer, and --skip-tokenizer-init loads none", param="stop")
    if not 1 <= prompt.n <= 128:
        raise RequestError(f"n is {prompt.n}, must be in [1, 128]", param="n")
    if prompt.max_tokens is not None and prompt.max_tokens < 0:
        raise RequestError(
            f"{prompt.limit_name} is {prompt.max_tokens}, must be at least 0", param=prompt.limit_name
        )
    budget = output_budget(
        len(prompt.ids), prompt.max_tokens, prompt.default_max_tokens, limits, prompt.limit_name
    )
    wish = prompt.logprobs
    if not -1 <= wish.start <= len(prompt.ids):
        raise RequestError(
            f"logprob_start_len is {wish.start}, must be in [-1, {len(prompt.ids)}] (the prompt's length)",
            param="logprob_start_len",
        )
    names = {"max_new_tokens": prompt.limit_name, **prompt.names}
    made = []
    for i in range(prompt.n):
        params = SamplingParams(**{f: getattr(prompt.sampling, f) for f in SamplingParams.__struct_fields__})
        params.max_new_tokens = max(1, budget)
        params.min_new_tokens = min(params.min_new_tokens, 1) if budget == 0 else params.min_new_tokens
        if params.seed is not None:
            params.seed += i
        made.append(
            (
                GenerateReq(
                    rid=prompt.rid if prompt.n == 1 else f"{prompt.rid}_{i}",
                    input_ids=prompt.ids,
                    sampling=check_sampling(params, limits.vocab_size, names),
                    stream=stream,
                    return_logprob=wish.wanted,
                    logprob_start_len=wish.start if wish.start < len(prompt.ids) else -1,
                    top_logprobs_num=wish.top,
                    extra_key=prompt.extra_key,
                    dp_rank=prompt.dp_rank,
                ),
                budget == 0,
            )
        )
    return made
