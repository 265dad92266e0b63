"""When a request ends: length, EOS, stop ids and stop strings. Pure, except for the tokenizer's decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sgl_jax.srt.managers.io_struct import FinishReason

if TYPE_CHECKING:
    from sgl_jax.srt.managers.request import Req

#: Tokens decoded besides those a stop string can span: special tokens, and one for a stripped leading space.
_TAIL_MARGIN = 8
_HALF_A_CHARACTER = "\ufffd"


class Tokenizer(Protocol):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


def abort_reason(message: str, status: int = 0) -> FinishReason:
    """An abort with its text and, where a client waits for an HTTP answer, its status."""
    return FinishReason(type="abort", message=message, status=status)


def out_of_memory_reason(pool_report: str) -> FinishReason:
    """End of a request that holds all it can get and still cannot continue (D39)."""
    return abort_reason(
        f"out of memory: the KV pools cannot hold this request any longer ({pool_report})", 503
    )


def token_finish(req: Req) -> FinishReason | None:
    """Finish by the newest output token: stop ids and EOS first, then length. ``min_new_tokens`` holds stops back."""
    if not req.output_ids:
        return None
    sampling, count, token = req.sampling_params, len(req.output_ids), req.output_ids[-1]
    if count >= sampling.min_new_tokens:
        ends = token in sampling.stop_token_ids or (not sampling.ignore_eos and token in req.eos_token_ids)
        if ends:
            return FinishReason(type="stop", matched=token)
    if count >= req.max_new_tokens:
        return FinishReason(type="length")
    return None


class StopStrings:
    """Finds stop strings in the decoded tail of the output. The tokenizer is loaded when the first request needs it."""

    def __init__(self, load_tokenizer: Callable[[], Any] | None) -> None:
        self._load = load_tokenizer
        self._tokenizer: Tokenizer | None = None

    @property
    def available(self) -> bool:
        return self._tokenizer is not None or self._load is not None

    def find(self, req: Req) -> FinishReason | None:
        """The first stop string (in the request's order) that the newest token completes.

        A string of b bytes spans at most b tokens, so decoding ``b + margin`` tokens of the tail is enough. Strings that were
        complete before ``min_new_tokens`` do not count.
        """
        sampling = req.sampling_params
        if not sampling.stop or len(req.output_ids) < sampling.min_new_tokens:
            return None
        longest = max(len(text.encode()) for text in sampling.stop)
        tail = req.output_ids[-(longest + _TAIL_MARGIN) :]
        text = self._decode(tail, sampling.skip_special_tokens)
        found = [stop for stop in sampling.stop if stop and stop in text]
        if found and sampling.min_new_tokens:
            known = len(self._decode(tail[:-1], sampling.skip_special_tokens).rstrip(_HALF_A_CHARACTER))
            found = [stop for stop in found if text.rfind(stop) + len(stop) > known]
        return FinishReason(type="stop", matched=found[0]) if found else None

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._get().decode(ids, skip_special_tokens=skip_special_tokens)

    def _get(self) -> Tokenizer:
        if self._tokenizer is None:
            if self._load is None:
                raise RuntimeError("stop strings need a tokenizer, and this scheduler was built without one")
            self._tokenizer = self._load()
        return self._tokenizer


def finish_reason(req: Req, stops: StopStrings) -> FinishReason | None:
    """Why the request ends after its newest token, or None. An abort wins, then stop ids, EOS, strings, length."""
    if req.to_finish is not None:
        return req.to_finish
    by_token = token_finish(req)
    if by_token is not None and by_token.type == "stop":
        return by_token
    return stops.find(req) or by_token
