"""``ServerArgs``: the resolved, frozen configuration, and where each value came from."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from sgl_jax.srt.server_args.checks import check_all_values, check_conflicts, refuse_absent_features
from sgl_jax.srt.server_args.errors import ServerArgsError
from sgl_jax.srt.server_args.flags import BY_NAME, FLAGS, UNIFIED_ENV

SOURCES = ("user", "environment", "model", "derived", "default")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class ServerArgs:
    """All server arguments after resolution; immutable.

    ``ServerArgs(model_path=..., page_size=128)`` resolves like the command line: values given are "user" (None means not
    given), the rest comes from the environment, from other values ("derived") or from the table of defaults. Raises
    :class:`ServerArgsError` on a bad value, an absent feature or a conflict; no value given by the user is ever changed (D77).
    """

    model_path: str
    tokenizer_path: str
    served_model_name: str
    trust_remote_code: bool
    dtype: str
    load_format: str
    context_length: int | None
    chat_template: str | None
    skip_tokenizer_init: bool
    host: str
    port: int
    api_key: str | None
    max_queued_requests: int | None
    watchdog_timeout: float
    drain_timeout: float
    skip_server_warmup: bool
    tp_size: int
    dp_size: int
    dp_schedule_policy: str
    device: str
    random_seed: int
    page_size: int
    mem_fraction_static: float | None
    max_total_tokens: int | None
    swa_full_tokens_ratio: float
    disable_hybrid_swa_memory: bool
    disable_radix_cache: bool
    enable_unified_radix_tree: bool
    enable_cache_report: bool
    debug_cache: bool
    chunked_prefill_size: int
    max_prefill_tokens: int
    max_running_requests: int | None
    schedule_policy: str
    schedule_conservativeness: float
    disable_overlap_schedule: bool
    attention_backend: str
    moe_backend: str
    precompile_token_paddings: tuple[int, ...] | None
    precompile_bs_paddings: tuple[int, ...] | None
    disable_precompile: bool
    log_level: str
    log_requests: bool
    decode_log_interval: int
    enable_metrics: bool
    ep_size: int
    nnodes: int
    node_rank: int
    dist_init_addr: str | None
    dist_timeout: int | None
    hicache_storage: str
    hicache_ratio: float
    hicache_write_through_threshold: int
    hicache_write_policy: str
    enable_recurrent_extra_buffer: bool
    recurrent_track_interval: int | None
    speculative_algorithm: str | None
    pd_disaggregation: str
    disaggregation_mode: str
    _provenance: dict[str, str] = field(compare=False)
    _notes: dict[str, str] = field(compare=False)

    def __init__(self, **given: Any) -> None:
        typed = {
            name: BY_NAME[name].flag for name, value in given.items() if name in BY_NAME and value is not None
        }
        self._resolve(given, typed)

    def _resolve(self, given: Mapping[str, Any], typed: Mapping[str, str]) -> None:
        unknown = sorted(set(given) - set(BY_NAME))
        if unknown:
            raise TypeError(f"unknown server argument(s): {', '.join(unknown)}")
        if not given.get("model_path"):
            raise ServerArgsError("--model-path", None, "is required", "Give a local folder with config.json")
        given = {name: value for name, value in given.items() if value is not None}
        values = {flag.name: given.get(flag.name, flag.default) for flag in FLAGS}
        source = {flag.name: "user" if flag.name in given else "default" for flag in FLAGS}
        notes = dict(typed)
        typed = dict(typed)
        if _environment_switch(UNIFIED_ENV) and not values["enable_unified_radix_tree"]:
            values["enable_unified_radix_tree"] = True
            source["enable_unified_radix_tree"] = "environment"
            notes["enable_unified_radix_tree"] = typed["enable_unified_radix_tree"] = f"{UNIFIED_ENV}=1"
        check_all_values(values, typed)
        refuse_absent_features(values, typed)
        _derive(values, source, notes)
        check_conflicts(values, typed)
        for name in ("precompile_token_paddings", "precompile_bs_paddings"):
            if values[name] is not None:
                values[name] = tuple(sorted(set(values[name])))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_provenance", source)
        object.__setattr__(self, "_notes", notes)

    @classmethod
    def from_cli(cls, argv: Sequence[str]) -> ServerArgs:
        """Parses and resolves. Prints usage and exits 2 on a syntax error; raises ServerArgsError on a bad value."""
        from sgl_jax.srt.server_args.cli import build_parser

        return cls.from_cli_args(build_parser().parse_args(list(argv)))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        from sgl_jax.srt.server_args.cli import add_flags

        add_flags(parser)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> ServerArgs:
        """From a namespace of a parser made by :meth:`add_cli_args`; only what was typed counts as the user's."""
        given = {name: value for name, value in vars(namespace).items() if name in BY_NAME}
        typed = dict(getattr(namespace, "typed_spellings", {}))
        made = object.__new__(cls)
        made._resolve(given, {name: typed.get(name, BY_NAME[name].flag) for name in given})
        return made

    @property
    def provenance(self) -> Mapping[str, str]:
        """Field -> one of :data:`SOURCES`."""
        return MappingProxyType(self._provenance)

    @property
    def notes(self) -> Mapping[str, str]:
        """Field -> the spelling the user typed, or from what a value was derived."""
        return MappingProxyType(self._notes)

    @property
    def enable_unified_radix_cache(self) -> bool:
        return self.enable_unified_radix_tree

    @property
    def max_seq_len(self) -> int | None:
        return self.context_length

    @property
    def attention_tp_size(self) -> int:
        """Size of the attention tensor axis."""
        return self.tp_size // self.dp_size

    def with_resolved(self, source: str, **values: Any) -> ServerArgs:
        """A copy with late values filled in by the ``source`` ("model" or "derived"). A user's value stays: naming one raises."""
        if source not in ("model", "derived"):
            raise ValueError(f"source {source!r}: late values come from 'model' or 'derived'")
        taken = [n for n in values if self._provenance.get(n) in ("user", "environment")]
        if taken:
            raise ServerArgsError(
                BY_NAME[taken[0]].flag,
                getattr(self, taken[0]),
                "was given explicitly",
                "It is never overridden",
            )
        made = object.__new__(type(self))
        for name in BY_NAME:
            object.__setattr__(made, name, values.get(name, getattr(self, name)))
        object.__setattr__(made, "_provenance", self._provenance | dict.fromkeys(values, source))
        object.__setattr__(made, "_notes", dict(self._notes))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Field -> value, JSON-ready; the API key is masked."""
        values = {name: getattr(self, name) for name in BY_NAME}
        if values["api_key"] is not None:
            values["api_key"] = "***"
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Field -> {value, source, note}: what /get_server_info and the start-up plan show."""
        return {
            name: {"value": value, "source": self._provenance[name], "note": self._notes.get(name, "")}
            for name, value in self.to_dict().items()
        }

    def __repr__(self) -> str:
        shown = (f"{n}={v!r}" for n, v in self.to_dict().items() if self._provenance[n] != "default")
        return f"ServerArgs({', '.join(shown)})"


def _environment_switch(name: str) -> bool:
    """A 0/1 switch from the environment. Raises on anything else, so that a typo is not read as off."""
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "0", "false"):
        return False
    if text in ("1", "true"):
        return True
    raise ServerArgsError(name, f"= {text}", "must be 1 or 0", "Unset it, or set it to 1")


def _derive(values: dict[str, Any], source: dict[str, str], notes: dict[str, str]) -> None:
    """Fills values that follow from others. Touches only fields nobody gave."""

    def put(name: str, value: Any, why: str) -> None:
        if source[name] == "default":
            values[name] = value
            source[name] = "derived"
            notes[name] = why

    put("tokenizer_path", values["model_path"], "--model-path")
    put("served_model_name", values["model_path"], "--model-path")
    radix = not values["disable_radix_cache"]
    put(
        "dp_schedule_policy",
        "cache_aware" if radix else "min_running_queue",
        "radix cache on" if radix else "--disable-radix-cache",
    )
    page, chunk = values["page_size"], values["chunked_prefill_size"]
    if chunk % page:
        put("chunked_prefill_size", max(page, chunk // page * page), f"{chunk} rounded to --page-size {page}")


FIELD_NAMES = tuple(f.name for f in fields(ServerArgs) if not f.name.startswith("_"))


def prepare_server_args(argv: Sequence[str]) -> ServerArgs:
    """SGLang's name for :meth:`ServerArgs.from_cli`."""
    return ServerArgs.from_cli(argv)
