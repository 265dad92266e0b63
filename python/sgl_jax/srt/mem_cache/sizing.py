"""Pool sizes and per-request caps: pure functions that start-up, admission and the planner share (D43, D44, D47, D72, D77).

Units are tokens unless a name says bytes or pages. ``--max-total-tokens`` counts FULL tokens over all ranks; memory is what one
rank may spend on KV over its whole tensor axis. SWA tokens = FULL tokens * ``--swa-full-tokens-ratio``; both are floored to
``page_size * dp_size``, and each rank's arrays carry one padding page more.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.window import peak_live_tokens

DEFAULT_SWA_RATIO = 0.8
#: Pages a budget keeps back, per request and pool: an extend may need one page more than its tokens (D43).
MARGIN_PAGES = 1

TOTAL_FLAG = "--max-total-tokens"
MEMORY_FLAG = "--mem-fraction-static"
RATIO_FLAG = "--swa-full-tokens-ratio"


class PoolConfigError(ValueError):
    """The flags give pools that cannot work. Names flag, value, minimum (or maximum) and remedy."""

    def __init__(self, flag: str, value: object, limit: str, remedy: str) -> None:
        self.flag, self.value, self.limit, self.remedy = flag, value, limit, remedy
        super().__init__(f"{flag} {value}: {limit}; {remedy}")


# -- bytes ---------------------------------------------------------------------------------------------------------


def stored_kv_heads(kv_heads: int, tensor_size: int) -> int:
    """KV heads the pool holds over the tensor axis: replicated up to the axis size when fewer (DECISIONS 11).

    Raises ValueError when neither divides the other.
    """
    if kv_heads % tensor_size == 0:
        return kv_heads
    if tensor_size % kv_heads == 0:
        return tensor_size
    raise ValueError(
        f"{kv_heads} KV heads can neither be split over nor replicated to a tensor axis of {tensor_size}; "
        f"choose --tp-size / --dp-size so that one divides the other"
    )


def token_bytes(
    num_layers: int, kv_heads: int, head_dim: int, v_head_dim: int, itemsize: int, tensor_size: int = 1
) -> int:
    """Bytes one token takes in all ``num_layers`` layers of one kind, K and V, over the tensor axis, replicas counted."""
    return num_layers * stored_kv_heads(kv_heads, tensor_size) * (head_dim + v_head_dim) * itemsize


# -- what one request may hold ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CapRules:
    """Constants of the caps.

    ``window``: keys a query sees including itself, None without SWA layers. ``chunk_size``: None for whole prompts.
    ``interval_multiplier``: of the reclaim interval. ``chunks_in_flight``: chunks of one prompt between two reclaims,
    2 with overlap scheduling (rule 9), else 1.
    """

    page_size: int
    window: int | None = None
    chunk_size: int | None = None
    interval_multiplier: float = 1.0
    chunks_in_flight: int = 1

    @property
    def margin(self) -> int:
        return MARGIN_PAGES * self.page_size

    @property
    def residue(self) -> int:
        """SWA tokens a reclaim leaves behind, page rounding included: ceil(W) + 2 pages."""
        if self.window is None:
            return 0
        return ceil_page(self.window, self.page_size) + 2 * self.page_size

    @property
    def decode_peak(self) -> int:
        """Most SWA tokens a decoding request holds between two reclaims, whole pages (D79)."""
        if self.window is None:
            return 0
        return ceil_page(
            peak_live_tokens(self.window, self.page_size, self.interval_multiplier), self.page_size
        )


def full_request_cap(extend_len: int, new_tokens: int, rules: CapRules) -> int:
    """FULL tokens a request takes beyond its matched prefix until it ends: its pages plus the margin (D44)."""
    return ceil_page(extend_len + new_tokens, rules.page_size) + rules.margin


def swa_request_cap(extend_len: int, new_tokens: int, rules: CapRules) -> int:
    """Most SWA tokens a request holds at once, plus the margin; bounded whatever the prompt length (D47).

    ::

        prefill   one chunk per flight; with more chunks to come also the residue a reclaim leaves
        decode    the decode peak
        never     more than all the tokens it will own
    """
    if rules.window is None:
        return 0
    page = rules.page_size
    in_flight = extend_len
    if rules.chunk_size is not None:
        in_flight = min(extend_len, rules.chunk_size * rules.chunks_in_flight)
    prefill = ceil_page(in_flight, page) + (rules.residue if in_flight < extend_len else 0)
    owned = ceil_page(extend_len + new_tokens, page)
    return min(owned, max(prefill, rules.decode_peak)) + rules.margin


def chunk_within(swa_budget: int, rules: CapRules) -> int:
    """Longest prompt piece, whole pages, that an SWA budget admits with more pieces to come; 0 defers the request (D43)."""
    if rules.window is None:
        raise ValueError("chunk_within needs a window; a model without SWA layers has no SWA budget")
    room = swa_budget - rules.margin - rules.residue
    return floor_page(room // rules.chunks_in_flight, rules.page_size)


def minimum_full_tokens(rules: CapRules) -> int:
    """Smallest FULL pool of a rank in which some request can ever be admitted."""
    return full_request_cap(1, 1, rules)


def minimum_swa_tokens(context_len: int, rules: CapRules) -> int:
    """Smallest SWA pool of a rank in which a request of any length can be admitted, page by page if need be (D72)."""
    if rules.window is None:
        return 0
    one_page = CapRules(
        rules.page_size, rules.window, rules.page_size, rules.interval_multiplier, rules.chunks_in_flight
    )
    return swa_request_cap(context_len, 0, one_page)


# -- pools -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What the model costs: bytes per token of all FULL and of all SWA layers of a rank, ranks, context, cap rules."""

    full_token_bytes: int
    swa_token_bytes: int
    dp_size: int
    context_len: int
    rules: CapRules

    @property
    def hybrid(self) -> bool:
        return self.rules.window is not None


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Sizes of both pools. ``full_tokens`` and ``swa_tokens`` are per rank, usable slots, whole pages.

    ``sources`` says where each number came from, one sentence each, for the start-up plan (D77).
    """

    demand: PoolDemand
    full_tokens: int
    swa_tokens: int
    sources: tuple[str, ...]

    @property
    def page_size(self) -> int:
        return self.demand.rules.page_size

    @property
    def dp_size(self) -> int:
        return self.demand.dp_size

    @property
    def total_full_tokens(self) -> int:
        """All ranks: the ``size`` of allocator and pool."""
        return self.full_tokens * self.dp_size

    @property
    def total_swa_tokens(self) -> int:
        """All ranks: the ``size_swa`` of allocator and pool."""
        return self.swa_tokens * self.dp_size

    @property
    def full_pages(self) -> int:
        """Usable pages of a rank."""
        return self.full_tokens // self.page_size

    @property
    def swa_pages(self) -> int:
        """Usable pages of a rank."""
        return self.swa_tokens // self.page_size

    @property
    def full_bytes(self) -> int:
        """Bytes of a rank's FULL arrays, padding page included."""
        return (self.full_tokens + self.page_size) * self.demand.full_token_bytes

    @property
    def swa_bytes(self) -> int:
        """Bytes of a rank's SWA arrays, padding page included; 0 without SWA layers."""
        if not self.demand.hybrid:
            return 0
        return (self.swa_tokens + self.page_size) * self.demand.swa_token_bytes

    @property
    def rank_bytes(self) -> int:
        return self.full_bytes + self.swa_bytes

    @property
    def largest_request(self) -> int:
        """Prompt plus output tokens of the largest request an empty rank serves, at most the context length (D44).

        Alone, a prompt in chunks takes whatever the window pool holds, page by page if need be: the FULL pool is its limit. A whole prompt
        must fit the window pool at once.
        """
        rules = self.demand.rules
        longest = min(self.full_tokens - rules.margin, self.demand.context_len)
        if self.demand.hybrid and rules.chunk_size is None:
            longest = min(longest, self.swa_tokens - rules.margin)
        return longest

    @property
    def concurrency(self) -> float:
        """Requests of :attr:`largest_request` tokens a rank runs side by side, decoding; the tighter pool decides."""
        rules = self.demand.rules
        longest = ceil_page(self.largest_request, rules.page_size)
        full = self.full_tokens / longest
        if not self.demand.hybrid:
            return full
        return min(full, self.swa_tokens / min(longest, rules.decode_peak))


def plan_pools(
    demand: PoolDemand,
    *,
    ratio: float | None = None,
    max_total_tokens: int | None = None,
    memory_bytes: int | None = None,
    memory_fraction: float | None = None,
) -> PoolPlan:
    """Pools from an explicit total or from memory; an explicit value wins or the start fails, never silently neither (D77).

    Args:
        ratio: SWA / FULL tokens as the user gave it; None for the default. An error for a model without SWA layers.
        max_total_tokens: FULL tokens over all ranks.
        memory_bytes: KV bytes of one rank over its tensor axis; with a total it is only the upper bound.
        memory_fraction: the flag's value that gave them, for messages; None when they are the default.

    Raises:
        PoolConfigError: a pool too small for any request (with the minimum), too big for the memory, or a ratio that
            does not apply.
        ValueError: neither total nor memory given.
    """
    exact, ratio_source = _ratio(demand, ratio)
    if max_total_tokens is not None:
        page, dp = demand.rules.page_size, demand.dp_size
        pages = max(0, max_total_tokens) // (page * dp)
        plan = _plan(demand, pages, exact, f"FULL tokens from {TOTAL_FLAG} {max_total_tokens}", ratio_source)
        if memory_bytes is not None and plan.rank_bytes > memory_bytes:
            fitting = _pages_in(demand, exact, memory_bytes) * page * dp
            raise PoolConfigError(
                TOTAL_FLAG,
                max_total_tokens,
                f"needs {plan.rank_bytes} bytes per rank, {memory_bytes} are available",
                f"use at most {TOTAL_FLAG} {fitting}, or raise {MEMORY_FLAG}",
            )
        _check_minimum(plan, exact, TOTAL_FLAG, max_total_tokens)
        return plan
    if memory_bytes is None:
        raise ValueError(f"pool sizes need {TOTAL_FLAG} or a memory budget in bytes")
    pages = _pages_in(demand, exact, memory_bytes)
    plan = _plan(
        demand, pages, exact, f"FULL tokens from {memory_bytes} bytes of KV memory per rank", ratio_source
    )
    fraction = "by default" if memory_fraction is None else f"{memory_fraction:g}"
    _check_minimum(plan, exact, MEMORY_FLAG, f"{fraction} leaves {memory_bytes} bytes for KV")
    return plan


def _ratio(demand: PoolDemand, ratio: float | None) -> tuple[Fraction, str]:
    if not demand.hybrid:
        if ratio is not None:
            raise PoolConfigError(
                RATIO_FLAG,
                ratio,
                "the model has no SWA layers, so there is no SWA pool to size",
                "drop the flag",
            )
        return Fraction(0), "no SWA layers, no SWA pool"
    if ratio is None:
        return Fraction(str(DEFAULT_SWA_RATIO)), f"SWA/FULL ratio {DEFAULT_SWA_RATIO} by default"
    if ratio <= 0:
        raise PoolConfigError(RATIO_FLAG, ratio, "must be above 0", f"the default is {DEFAULT_SWA_RATIO}")
    return Fraction(str(ratio)), f"SWA/FULL ratio from {RATIO_FLAG} {ratio}"


def _plan(demand: PoolDemand, pages: int, ratio: Fraction, *sources: str) -> PoolPlan:
    page = demand.rules.page_size
    return PoolPlan(demand, pages * page, int(pages * ratio) * page, sources)


def _pages_in(demand: PoolDemand, ratio: Fraction, memory_bytes: int) -> int:
    """Most FULL pages per rank whose arrays, SWA and padding included, fit; 0 when none do."""
    page = demand.rules.page_size
    full_page = demand.full_token_bytes * page
    swa_page = demand.swa_token_bytes * page if demand.hybrid else 0
    per_page = full_page + ratio * swa_page
    if per_page == 0:
        raise ValueError("pool sizes from memory need a model with at least one attention layer")
    pages = max(0, int((memory_bytes - full_page - swa_page) / per_page))
    while (pages + 2) * full_page + (int((pages + 1) * ratio) + 1) * swa_page <= memory_bytes:
        pages += 1  # SWA pages are floored, so a few more may fit
    return pages


def _check_minimum(plan: PoolPlan, ratio: Fraction, flag: str, value: object) -> None:
    """Refuse pools in which nothing could ever be admitted, with the sizes that can (D72)."""
    demand = plan.demand
    rules, step = demand.rules, demand.rules.page_size * demand.dp_size
    min_full = minimum_full_tokens(rules)
    min_swa = minimum_swa_tokens(demand.context_len, rules)
    if plan.full_tokens >= min_full and plan.swa_tokens >= min_swa:
        return
    needed = min_full
    if demand.hybrid:
        pages = -(-min_swa // rules.page_size)
        needed = max(min_full, -int(-pages // ratio) * rules.page_size)
    limit = f"FULL {plan.full_tokens} tokens per rank (minimum {min_full})"
    remedy = f"use {TOTAL_FLAG} {ceil_page(needed * demand.dp_size, step)} or more"
    if demand.hybrid:
        limit += (
            f", SWA {plan.swa_tokens} (minimum {min_swa} for window {rules.window}, page size {rules.page_size})"
            f" at {RATIO_FLAG} {float(ratio):g}"
        )
        if min_full <= plan.full_tokens and min_swa <= plan.full_tokens:
            least = Fraction(min_swa, plan.full_tokens)
            remedy += f", or {RATIO_FLAG} {-int(-least * 1000 // 1) / 1000:g} or more"
    if flag == MEMORY_FLAG:
        remedy += f", or raise {MEMORY_FLAG}"
    raise PoolConfigError(flag, value, limit, remedy)
