"""What the front end knows about one sequence between sending it and its last token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sgl_jax.srt.managers.detokenizer import IncrementalDetokenizer
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.io_struct import FinishReason, GenerateReq, TokenOut

TopLogprobs = list[tuple[float, int]]


@dataclass(slots=True)
class Logprobs:
    """Logprobs so far, aligned with tokens: ``output[i]`` belongs to output token i, ``prompt[i]`` to position start + i."""

    output: list[float] = field(default_factory=list)
    output_top: list[TopLogprobs] = field(default_factory=list)
    prompt: list[float | None] = field(default_factory=list)
    prompt_top: list[TopLogprobs | None] = field(default_factory=list)

    def extend(self, out: TokenOut) -> None:
        self.output.extend(out.logprobs or ())
        self.output_top.extend(out.top_logprobs or ())
        self.prompt.extend(out.input_logprobs or ())
        self.prompt_top.extend(out.input_top_logprobs or ())


class RequestState:
    """One sequence. Written by the receive loop, read by whoever serves it; ``wait`` returns when there is news.

    The text is decoded when it is read, so a request that nobody streams is decoded once. Kept until the scheduler has
    confirmed the end, also when the client has gone (D68).
    """

    def __init__(
        self,
        request: GenerateReq,
        detokenizer: IncrementalDetokenizer | None,
        drop_output: bool,
        counted: bool,
    ) -> None:
        self.request = request
        self.counted = counted
        self.drop_output = drop_output
        self.output_ids: list[int] = []
        self.logprobs = Logprobs()
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.cached_tokens = 0
        self.dp_rank = 0
        self.retractions = 0
        self.started = time.monotonic()
        self.first_output_at: float | None = None
        self.last_output_at = self.started
        self.ended_at: float | None = None
        self.abort_sent = False
        self._detokenizer = detokenizer
        self._decoded = 0
        self._text_done = False
        self._news = asyncio.Event()

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.input_ids)

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def latency(self) -> float:
        return (self.ended_at or time.monotonic()) - self.started

    def apply(self, out: TokenOut, now: float) -> None:
        """Takes over one output of the scheduler."""
        self.cached_tokens = max(self.cached_tokens, out.cached_tokens)
        self.dp_rank = out.dp_rank
        self.retractions = out.retractions
        if not self.drop_output:
            self.output_ids.extend(out.token_ids)
            self.logprobs.extend(out)
        else:
            self.logprobs.prompt.extend(out.input_logprobs or ())
            self.logprobs.prompt_top.extend(out.input_top_logprobs or ())
        if out.finish is not None:
            self._end(out.finish, now)
        self._news.set()

    def _end(self, finish: FinishReason, now: float) -> None:
        self.ended_at = now
        if finish.type == "abort" and finish.status:
            self.error = RequestError(finish.message or "the request was aborted", finish.status)
        if self.drop_output and finish.type != "abort":
            finish = FinishReason(type="length")
        self.finish = finish

    def fail(self, error: RequestError) -> None:
        """Ends the request from our side (the scheduler is gone)."""
        if not self.done:
            self.error = error
            self.ended_at = time.monotonic()
        self._news.set()

    async def wait(self) -> None:
        """Until something new arrived since the last call. Raises the request's error."""
        if not self.done:
            await self._news.wait()
            self._news.clear()
        if self.error is not None:
            raise self.error

    def text(self) -> str:
        """Text that is certain by now; all of it once the sequence is done. Empty without a tokenizer."""
        detok = self._detokenizer
        if detok is None or self._text_done:
            return detok.text if detok is not None else ""
        end = len(self.output_ids)
        matched = self.finish.matched if self.finish is not None else None
        if isinstance(matched, int) and end > self._decoded and self.output_ids[-1] == matched:
            end -= 1  # the stop token is no part of the text
        fresh = self.output_ids[self._decoded : end]
        self._decoded = end
        if self.done:
            detok.finish(fresh, matched)
            self._text_done = True
        else:
            detok.push(fresh)
        return detok.text
