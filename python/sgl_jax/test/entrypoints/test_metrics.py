"""Counters are monotonic, gauges follow the heartbeat, every rank is there from the start."""

from __future__ import annotations

import re

from sgl_jax.srt.managers.prometheus_metrics import FrontEndMetrics


def value(metrics, name, rank=0):
    found = re.search(
        rf'^sglang:{name}{{dp_rank="{rank}",model_name="m"}} (\S+)$', metrics.render().decode(), flags=re.M
    )
    return None if found is None else float(found[1])


def test_counters_exist_before_their_first_event():
    metrics = FrontEndMetrics("m", 2)
    for rank in (0, 1):
        assert value(metrics, "cached_tokens_total", rank) == 0
        assert value(metrics, "num_requests_total", rank) == 0
        assert value(metrics, "e2e_request_latency_seconds_count", rank) == 0


def test_heartbeat_gauges_per_rank_and_scheduler_counters_never_fall():
    metrics = FrontEndMetrics("m", 2)
    metrics.update(
        {"ranks": [{"token_usage": 0.5}, {"token_usage": 0.25}], "counters": {"evicted_tokens_total": [5, 6]}}
    )
    metrics.update(
        {
            "ranks": [{"token_usage": 0.75}],
            "counters": {"evicted_tokens_total": [3, 9], "num_retracted_reqs": [1, 0]},
        }
    )
    assert [value(metrics, "token_usage", r) for r in (0, 1)] == [0.75, None]
    assert [value(metrics, "evicted_tokens_total", r) for r in (0, 1)] == [5, 9]
    assert [value(metrics, "num_retracted_reqs", r) for r in (0, 1)] == [1, 0]


def test_d71_hit_rate_is_cumulative_and_survives_decode_reports():
    """D71: a scrape after many heartbeats still shows the hits."""
    metrics = FrontEndMetrics("m", 1)
    metrics.first_output(0, 100, 80, 0.1, 0.0)
    for _ in range(100):
        metrics.output(0, 1)
        metrics.inter_token(0, 0.01, 1)
        metrics.update({"ranks": [{"cache_hit_rate": 0.0}], "counters": {"cached_tokens_total": [0]}})
    assert value(metrics, "cache_hit_rate") == 0.8
    assert value(metrics, "cached_tokens_total") == 80
    assert value(metrics, "generation_tokens_total") == 100
    assert value(metrics, "inter_token_latency_seconds_count") == 100


def test_capacities_come_from_start_until_a_heartbeat_says_more():
    metrics = FrontEndMetrics("m", 2)
    metrics.set_capacities({"max_total_num_tokens": 1000, "swa_max_total_num_tokens": 800}, 16)
    assert [value(metrics, n) for n in ("max_total_num_tokens", "max_total_num_tokens_swa", "page_size")] == [
        500,
        400,
        16,
    ]
    metrics.update({"ranks": [{"max_total_num_tokens": 512}, {}]})
    assert value(metrics, "max_total_num_tokens") == 512


def test_label_values_are_escaped():
    metrics = FrontEndMetrics('a"b\\c', 1)
    assert 'model_name="a\\"b\\\\c"' in metrics.render().decode()
