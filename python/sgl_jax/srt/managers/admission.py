"""Admission arithmetic: what a request needs of both pools and what a rank has left. Pure functions of plain numbers.

The caps are those that sized the pools (``mem_cache/sizing.py``): they gate entry (never-fit), admission and the reservations of
running requests, so that the largest accepted request is admissible on an empty server (D44). Nothing grows with the prompt length in the window pool: its need is
bounded by what can be live at once (D47, D79).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.managers.request import WaitReason
from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.sizing import CapRules, full_request_cap, swa_request_cap

Int32 = npt.NDArray[np.int32]

#: Size of a pool that does not exist: never short.
UNLIMITED = 1 << 60

#: Output tokens of one request that admission reserves at most; beyond it the ratio of running requests takes over.
CLIP_NEW_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens per pool of one rank."""

    full: int
    swa: int

    def minus(self, other: Room) -> Room:
        return Room(self.full - other.full, self.swa - other.swa)


def request_need(total: int, prefix: int, new_tokens: int, rules: CapRules) -> Room:
    """What a request takes from the pools until it ends, before any of it is allocated (D38).

    ``total`` known tokens, ``prefix`` of them matched; the expected output is clipped to :data:`CLIP_NEW_TOKENS`.
    """
    new_tokens = min(new_tokens, CLIP_NEW_TOKENS)
    extend = total - prefix
    return Room(full_request_cap(extend, new_tokens, rules), swa_request_cap(extend, new_tokens, rules))


def reserved_by_running(
    budget: Int32, owned_swa: Int32, unprefilled: Int32, ratio: float, rules: CapRules
) -> Room:
    """Future need of the seated requests of a rank, beyond what they hold, each array ``[seats]``.

    FULL: the prompt part not yet prefilled, plus ``ratio`` of the output budget and half a page of rounding on average.
    SWA: what is missing to the decode peak, or to the next chunk, but never more than the tokens still to come.
    """
    if not len(budget):
        return Room(0, 0)
    page = rules.page_size
    output = np.ceil(np.minimum(budget, CLIP_NEW_TOKENS) * ratio).astype(np.int64) + page // 2
    full = int(output.sum() + unprefilled.sum())
    if rules.window is None:
        return Room(full, 0)
    chunk = unprefilled if rules.chunk_size is None else np.minimum(unprefilled, rules.chunk_size)
    ahead = budget.astype(np.int64) + unprefilled
    target = np.minimum(np.maximum(rules.decode_peak, chunk), owned_swa + ahead)
    swa = np.maximum(target - owned_swa, 0)
    return Room(full, int((-(-swa // page) * page).sum()))


def refusal(need: Room, room: Room) -> WaitReason | None:
    """Why a request with ``need`` cannot be admitted into ``room``; None when it can."""
    if need.full > room.full:
        return WaitReason.FULL_POOL
    if need.swa > room.swa:
        return WaitReason.SWA_POOL
    return None


def fit_extend(wanted: int, start: int, room: Room, rules: CapRules) -> int:
    """Largest extend from ``start`` of at most ``wanted`` tokens that both pools can take; 0 when none.

    A shortened chunk ends on a page boundary. One page of the window pool stays back for the rounding of the allocation (D43).
    """
    page = rules.page_size
    in_page = ceil_page(start, page) - start  # slots left in the page the request already has
    limit = in_page + floor_page(room.full, page)
    if rules.window is not None:
        limit = min(limit, in_page + floor_page(room.swa - rules.margin, page))
    if wanted <= limit:
        return wanted
    return max(0, floor_page(start + limit, page) - start)


def chunk_end(start: int, total: int, budget: int, page_size: int) -> int:
    """End of the next chunk: all that is left, or the budget cut to a page boundary (``start`` when that is nothing)."""
    if total - start <= budget:
        return total
    return max(start, floor_page(start + budget, page_size))


@dataclass(frozen=True, slots=True)
class NeverFits:
    """Why a request can never be served: value, limit, flag that raises it."""

    message: str


def clip_new_tokens(prompt: int, wanted: int, capacity: Room, context_len: int, rules: CapRules) -> int:
    """Output tokens a request may have: the context and the FULL pool, with the margin that admission takes (D44)."""
    fits = floor_page(capacity.full, rules.page_size) - rules.margin - prompt
    return max(0, min(wanted, context_len - prompt, fits))


def never_fits(
    prompt: int, capacity: Room, context_len: int, step_limit: int, rules: CapRules
) -> NeverFits | None:
    """Entry check with the formulas of admission on an empty rank. ``step_limit``: most tokens one prefill step takes."""
    if prompt >= context_len:
        return NeverFits(
            f"the prompt has {prompt} tokens; the context length is {context_len}, prompt and output together "
            "(--context-length): shorten the prompt"
        )
    if full_request_cap(prompt, 1, rules) > capacity.full:
        largest = floor_page(capacity.full, rules.page_size) - rules.margin - 1
        return NeverFits(
            f"the prompt has {prompt} tokens; the FULL KV pool of a rank has {capacity.full} slots and takes prompts of at "
            f"most {max(0, largest)}: raise --max-total-tokens or --mem-fraction-static"
        )
    if rules.chunk_size is None and prompt > step_limit:
        return NeverFits(
            f"the prompt has {prompt} tokens; without chunked prefill a step takes {step_limit}: set --chunked-prefill-size"
        )
    if rules.window is None:
        return None
    need = ceil_page(prompt, rules.page_size) + rules.margin
    if rules.chunk_size is not None:  # in the worst case it goes through page by page
        need = min(need, rules.page_size + rules.residue + rules.margin)
    if need > capacity.swa:
        return NeverFits(
            f"the prompt of {prompt} tokens needs {need} slots of the window KV pool at once; a rank has {capacity.swa}: raise "
            "--swa-full-tokens-ratio or --max-total-tokens"
            + ("" if rules.chunk_size is not None else ", or set --chunked-prefill-size")
        )
    return None
