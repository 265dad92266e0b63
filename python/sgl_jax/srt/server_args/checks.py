"""Value checks, refused features and conflicts. Pure functions over the resolved values; each raises or returns None."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from sgl_jax.srt.server_args.errors import FlagConflictError, ServerArgsError
from sgl_jax.srt.server_args.flags import BY_NAME, FLAGS, UNIFIED_SPELLINGS, Flag

_TYPES: dict[str, tuple[type[Any], ...]] = {
    "str": (str,),
    "int": (int,),
    "size": (int,),
    "float": (int, float),
    "bool": (bool,),
}

# Features this release does not have: (field, the neutral values, what it would do).
_ABSENT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("attention_backend", ("native",), "the Pallas attention kernels are not part of this release"),
    ("moe_backend", ("auto",), "mixture-of-experts models are not part of this release"),
    ("ep_size", (1,), "expert parallelism is not part of this release"),
    ("nnodes", (1,), "serving over several hosts is not part of this release"),
    ("hicache_storage", ("disable",), "HiCache is not part of this release"),
    ("speculative_algorithm", (None, "NONE", "none"), "speculative decoding is not part of this release"),
    ("pd_disaggregation", ("",), "prefill/decode disaggregation is not part of this release"),
    ("disaggregation_mode", ("null",), "prefill/decode disaggregation is not part of this release"),
    ("enable_recurrent_extra_buffer", (False,), "recurrent models are not part of this release"),
)

# Settings that only tune an absent feature: giving one explicitly would otherwise be ignored.
_TUNES_ABSENT = {
    "hicache_ratio": "hicache_storage",
    "hicache_write_through_threshold": "hicache_storage",
    "hicache_write_policy": "hicache_storage",
    "recurrent_track_interval": "enable_recurrent_extra_buffer",
    "node_rank": "nnodes",
    "dist_init_addr": "nnodes",
    "dist_timeout": "nnodes",
}

_ON_UNIFIED = (
    "hicache_storage",
    "speculative_algorithm",
    "pd_disaggregation",
    "disaggregation_mode",
    "enable_recurrent_extra_buffer",
)


def check_value(flag: Flag, value: Any, typed: str) -> None:
    """Type, choices and bounds of one value. Raises ServerArgsError with the nearest legal value."""
    if value is None or value in flag.special:
        return
    if flag.kind == "ints":
        if not isinstance(value, (list, tuple)) or not value:
            raise ServerArgsError(
                typed, value, "must be a non-empty list of integers", "Example: " + typed + " 64 128"
            )
        for item in value:
            _check_scalar(flag, item, typed, (int,))
        return
    _check_scalar(flag, value, typed, _TYPES[flag.kind])


def _check_scalar(flag: Flag, value: Any, typed: str, types: tuple[type[Any], ...]) -> None:
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        names = " or ".join(t.__name__ for t in types)
        raise ServerArgsError(typed, repr(value), f"must be of type {names}", f"Got {type(value).__name__}")
    if flag.choices and value not in flag.choices:
        near = difflib.get_close_matches(str(value), flag.choices, n=1, cutoff=0.0)
        raise ServerArgsError(
            typed,
            value,
            "must be one of " + ", ".join(flag.choices),
            f"Nearest legal value: {near[0] if near else flag.choices[0]}",
        )
    if flag.low is None and flag.high is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ServerArgsError(typed, value, "must be a finite number", f"Default: {flag.default}")
    number = float(value)
    low_bad = flag.low is not None and (number <= flag.low if flag.low_open else number < flag.low)
    high_bad = flag.high is not None and number > flag.high
    if low_bad or high_bad:
        raise ServerArgsError(typed, value, f"must be {_bounds(flag)}", _nearest(flag, low_bad))


def _bounds(flag: Flag) -> str:
    parts = []
    if flag.low is not None:
        parts.append(f"{'>' if flag.low_open else '>='} {flag.low:g}")
    if flag.high is not None:
        parts.append(f"<= {flag.high:.0f}" if flag.high > 1e6 else f"<= {flag.high:g}")
    special = "".join(f", or {v}" for v in flag.special)
    return " and ".join(parts) + special


def _nearest(flag: Flag, low_bad: bool) -> str:
    if not low_bad:
        return f"Nearest legal value: {flag.high:.0f}"
    if flag.low_open:
        shown = f"default: {flag.default}" if flag.default is not None else "leave it out to have it derived"
        return f"Any value above {flag.low:g} is legal; {shown}"
    return f"Nearest legal value: {flag.low:g}"


def refuse_absent_features(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    """A flag whose feature does not exist stops the start by name (DECISIONS 17, 18); it is never ignored.

    ``given``: field -> spelling the user typed. With the unified route asked for, the message names both flags, as typed
    and in the other spelling, and the legal alternative.
    """
    unified_on = values["enable_unified_radix_tree"] and not values["disable_radix_cache"]
    for name, neutral, why in _ABSENT:
        value = values[name]
        if value in neutral:
            continue
        flag = BY_NAME[name]
        typed = given.get(name, flag.flag)
        shown = typed if value is True else f"{typed} {value}"
        if name in _ON_UNIFIED and unified_on:
            raise FlagConflictError(
                unified_as_typed(given),
                None,
                shown,
                why,
                f"Leave out {typed}; --disable-radix-cache does not make it legal either",
            )
        raise ServerArgsError(
            typed, value, f"refused: {why}", f"Leave it out (default: {_default_text(flag)})"
        )
    for name, owner in _TUNES_ABSENT.items():
        if name in given and values[name] != BY_NAME[name].default:
            raise FlagConflictError(
                given[name],
                values[name],
                f"{BY_NAME[owner].flag} {_default_text(BY_NAME[owner])}",
                "it would have no effect, because that feature is not part of this release",
                "Leave it out",
            )


def _default_text(flag: Flag) -> str:
    if flag.kind == "bool":
        return "off"
    return "none" if flag.default in (None, "") else str(flag.default)


def unified_as_typed(given: Mapping[str, str]) -> str:
    """``--flag-as-typed (also spelled --other)``, so that whoever greps for either spelling finds the message."""
    typed = given.get("enable_unified_radix_tree", UNIFIED_SPELLINGS[0])
    if typed not in UNIFIED_SPELLINGS:  # set by the environment
        return f"{typed} ({' / '.join(UNIFIED_SPELLINGS)})"
    other = next(s for s in UNIFIED_SPELLINGS if s != typed)
    return f"{typed} (also spelled {other})"


def check_conflicts(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    """Pairs of explicit flags of which one would silently lose. Raises FlagConflictError naming both."""
    _check_pages(values, given)
    _check_parallel(values, given)
    _check_radix_off(values, given)
    if values["disable_hybrid_swa_memory"] and "swa_full_tokens_ratio" in given:
        raise FlagConflictError(
            given["swa_full_tokens_ratio"],
            values["swa_full_tokens_ratio"],
            "--disable-hybrid-swa-memory",
            "one pool for all layers has no SWA/FULL ratio",
            "Leave out one of the two",
        )
    if values["disable_precompile"]:
        for name in ("precompile_token_paddings", "precompile_bs_paddings"):
            if name in given:
                raise FlagConflictError(
                    given[name],
                    None,
                    "--disable-precompile",
                    "nothing is compiled ahead then",
                    "Leave out one of the two",
                )
    if values["skip_tokenizer_init"]:
        for name in ("tokenizer_path", "chat_template"):
            if name in given:
                raise FlagConflictError(
                    given[name],
                    values[name],
                    "--skip-tokenizer-init",
                    "no tokenizer is loaded then",
                    "Leave out one of the two",
                )


def _check_pages(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    page, chunk = values["page_size"], values["chunked_prefill_size"]
    if chunk == -1 or chunk % page == 0:
        return
    down, up = chunk // page * page, -(-chunk // page) * page
    near = up if down == 0 or up - chunk < chunk - down else down
    raise ServerArgsError(
        given.get("chunked_prefill_size", "--chunked-prefill-size"),
        chunk,
        f"must be a multiple of --page-size {page}, or -1",
        f"Nearest legal value: {near}",
    )


def _check_parallel(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    tp, dp = values["tp_size"], values["dp_size"]
    if tp % dp:
        legal = [d for d in range(1, tp + 1) if tp % d == 0]
        near = min(legal, key=lambda d: (abs(d - dp), -d))
        raise FlagConflictError(
            given.get("dp_size", "--dp-size"),
            dp,
            f"--tp-size {tp}",
            "tp counts all devices, so dp must divide it",
            f"Nearest legal value: --dp-size {near}, or --tp-size {-(-tp // dp) * dp}",
        )


def _check_radix_off(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    if not values["disable_radix_cache"]:
        return
    for name, value, legal in (
        ("schedule_policy", "lpm", "fcfs"),
        ("dp_schedule_policy", "cache_aware", "min_running_queue"),
    ):
        if values[name] == value:
            raise FlagConflictError(
                given.get(name, BY_NAME[name].flag),
                value,
                "--disable-radix-cache",
                "without a radix cache there are no prefixes to go by",
                f"Use {BY_NAME[name].flag} {legal}, or leave out --disable-radix-cache",
            )


def check_all_values(values: Mapping[str, Any], given: Mapping[str, str]) -> None:
    for flag in FLAGS:
        check_value(flag, values[flag.name], given.get(flag.name, flag.flag))
