"""Prometheus metrics with SGLang's names (docs/metrics.md lists them all).

Gauges and scheduler counters come from the last heartbeat; request counters and latencies from request events. A request's
prompt and its hit count once, at its first output, so a re-admission after retraction is never a hit (D70). Counters are
monotonic and rates are for the reader to derive (D71).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "sglang:"
LABELS = ("model_name", "dp_rank")

GAUGES: dict[str, str] = {
    "num_running_reqs": "Requests that decode or prefill now",
    "num_queue_reqs": "Requests that wait for admission",
    "num_used_tokens": "FULL slots in use by requests and locked prefixes",
    "token_usage": "Used share of the fuller pool",
    "full_token_usage": "Used share of the FULL pool",
    "swa_token_usage": "Used share of the SWA pool",
    "max_total_num_tokens": "Capacity of the FULL pool in slots",
    "max_total_num_tokens_swa": "Capacity of the SWA pool in slots",
    "page_size": "Tokens per KV page",
    "kv_available_tokens": "Free FULL slots",
    "kv_evictable_tokens": "FULL slots of unlocked cached prefixes",
    "swa_available_tokens": "Free SWA slots",
    "swa_evictable_tokens": "SWA slots of unlocked cached windows",
    "cache_hit_rate": "Cached share of all prompt tokens so far",
    "gen_throughput": "Generated tokens per second, from the last decode report",
    "num_retracted_reqs": "Retractions so far, as SGLang's gauge",
    "swa_used_tokens": "SWA slots in use by requests and locked windows",
    "swa_lock_held_tokens": "SWA slots that locks protect",
    "reclaim_lag_tokens": "Tokens behind the window that are not reclaimed yet",
}

COUNTERS: dict[str, str] = {
    "evicted_tokens_total": "FULL slots evicted from the tree",
    "full_evicted_total": "FULL slots evicted from the tree (the ledger's name)",
    "swa_evicted_tokens_total": "SWA slots evicted from the tree",
    "swa_evicted_total": "SWA slots evicted from the tree (the ledger's name)",
    "num_retracted_reqs_total": "Retractions",
    "tombstoned_tokens_total": "Cached tokens that lost their SWA slots and kept their FULL slots",
    "healed_tokens_total": "Tombstoned tokens that got SWA slots again",
    "tombstone_created_total": "Tree nodes that became tombstones (the ledger's events)",
    "tombstone_healed_total": "Tombstone nodes that were healed (the ledger's events)",
    "full_hit_swa_short_tokens_total": "Prompt tokens with FULL data that a missing SWA window made unusable",
    "readmitted_cached_tokens_total": "Cached tokens found when a retracted request came back (no hits)",
    "prompt_tokens_total": "Prompt tokens of admitted requests",
    "generation_tokens_total": "Generated tokens",
    "cached_tokens_total": "Prompt tokens found in the cache at a request's first admission",
    "num_requests_total": "Requests that ended",
    "num_aborted_requests_total": "Requests that ended by an abort",
}

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first output token", _SECONDS),
    "inter_token_latency_seconds": ("Between two output tokens", (0.001, 0.0025) + _SECONDS[:9]),
    "e2e_request_latency_seconds": ("From arrival to the last token", _SECONDS),
    "queue_time_seconds": ("From arrival to admission", (0.001,) + _SECONDS),
}


class FrontEndMetrics:
    """Counts request events; :meth:`update` takes a heartbeat. Costs nothing per slot or tree node.

    ``dp_size`` fixes the ranks that are reported, so a counter exists (as 0) before its first event.
    """

    def __init__(self, model_name: str, dp_size: int) -> None:
        self._model = model_name
        self._dp_size = dp_size
        self._static: dict[str, list[float]] = {}
        self._gauges: list[Mapping[str, Any]] = [{} for _ in range(dp_size)]
        self._scheduler_counters: dict[str, list[float]] = {}
        names = (
            "prompt_tokens_total",
            "generation_tokens_total",
            "cached_tokens_total",
            "num_requests_total",
            "num_aborted_requests_total",
        )
        self._counts: dict[str, list[float]] = {name: [0.0] * dp_size for name in names}
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(PREFIX + name, text, LABELS, registry=self.registry, buckets=buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        for name in HISTOGRAMS:
            for rank in range(dp_size):
                self._histograms[name].labels(model_name, str(rank))
        self.registry.register(_Live(self))

    def set_capacities(self, info: Mapping[str, Any], page_size: int) -> None:
        """Constants of the run, per rank: pool capacities from the scheduler's Ready message."""
        ranks = self._dp_size
        full = float(info.get("max_total_num_tokens") or 0) / ranks
        swa = float(info.get("swa_max_total_num_tokens") or 0) / ranks
        self._static = {
            "max_total_num_tokens": [full] * ranks,
            "max_total_num_tokens_swa": [swa] * ranks,
            "page_size": [float(page_size)] * ranks,
        }

    def update(self, stats: Mapping[str, Any]) -> None:
        """Takes a heartbeat's ``stats``. A counter that would go down keeps its value."""
        ranks = stats.get("ranks") or []
        self._gauges = [ranks[r] if r < len(ranks) else {} for r in range(self._dp_size)]
        for given, value in (stats.get("counters") or {}).items():
            name = given if given.endswith("_total") else given + "_total"
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            values += [0] * (self._dp_size - len(values))
            old = self._scheduler_counters.get(name, [0.0] * self._dp_size)
            self._scheduler_counters[name] = [max(a, float(b)) for a, b in zip(old, values)]

    def first_output(self, rank: int, prompt: int, cached: int, latency: float, queue_time: float) -> None:
        self._add("prompt_tokens_total", rank, prompt)
        self._add("cached_tokens_total", rank, cached)
        self._observe("time_to_first_token_seconds", rank, latency)
        self._observe("queue_time_seconds", rank, queue_time)

    def output(self, rank: int, tokens: int) -> None:
        self._add("generation_tokens_total", rank, tokens)

    def inter_token(self, rank: int, seconds: float, tokens: int) -> None:
        """``tokens`` arrived ``seconds`` after the one before them."""
        for _ in range(tokens):
            self._observe("inter_token_latency_seconds", rank, seconds / tokens)

    def finished(self, rank: int, latency: float, aborted: bool) -> None:
        self._add("num_requests_total", rank, 1)
        if aborted:
            self._add("num_aborted_requests_total", rank, 1)
        self._observe("e2e_request_latency_seconds", rank, latency)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _add(self, name: str, rank: int, amount: float) -> None:
        self._counts[name][min(rank, self._dp_size - 1)] += amount

    def _observe(self, name: str, rank: int, value: float) -> None:
        self._histograms[name].labels(self._model, str(rank)).observe(max(0.0, value))

    def gauge_values(self) -> Iterator[tuple[str, int, float]]:
        """(name, rank, value) of every gauge now; of a name and rank that come twice, the first counts."""
        for rank, gauges in enumerate(self._gauges):
            for name, value in gauges.items():
                if _is_number(value) and name != "cache_hit_rate":
                    yield name, rank, float(value)
        for name, values in self._static.items():
            yield from ((name, rank, value) for rank, value in enumerate(values))
        retractions = self._scheduler_counters.get("num_retracted_reqs_total", [])
        for rank, value in enumerate(retractions):
            yield "num_retracted_reqs", rank, value
        for rank in range(self._dp_size):
            prompt, cached = (
                self._counts["prompt_tokens_total"][rank],
                self._counts["cached_tokens_total"][rank],
            )
            yield "cache_hit_rate", rank, cached / prompt if prompt else 0.0

    def counter_values(self) -> dict[str, list[float]]:
        """Counter -> per-rank totals. What the front end counts itself wins over a heartbeat's number of that name."""
        return {**self._scheduler_counters, **self._counts}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Live(Collector):
    """Reads the values at scrape time."""

    def __init__(self, metrics: FrontEndMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        model = self._metrics._model
        gauges: dict[str, GaugeMetricFamily] = {}
        seen: set[tuple[str, int]] = set()
        for name, rank, value in self._metrics.gauge_values():
            if (name, rank) in seen:
                continue
            seen.add((name, rank))
            if name not in gauges:
                gauges[name] = GaugeMetricFamily(
                    PREFIX + name, GAUGES.get(name, "Scheduler gauge"), labels=LABELS
                )
            gauges[name].add_metric([model, str(rank)], value)
        yield from gauges.values()
        for name, values in self._metrics.counter_values().items():
            family = CounterMetricFamily(
                PREFIX + name, COUNTERS.get(name, "Scheduler counter"), labels=LABELS
            )
            for rank, value in enumerate(values):
                family.add_metric([model, str(rank)], value)
            yield family
