"""Dashboard, alerts and docs name only metrics that a live server exposes, and the server exposes all that were promised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sgl_jax.test.e2e.test_serving import GREEDY, server  # noqa: F401

pytestmark = pytest.mark.xdist_group("e2e-serving")

ROOT = Path(__file__).resolve().parents[4]
PROMISED = [
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "full_token_usage",
    "swa_token_usage",
    "max_total_num_tokens",
    "max_total_num_tokens_swa",
    "page_size",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "swa_available_tokens",
    "swa_evictable_tokens",
    "cache_hit_rate",
    "gen_throughput",
    "num_retracted_reqs",
    "evicted_tokens_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "queue_time_seconds",
]


@pytest.fixture(scope="module")
def scrape(server):  # noqa: F811
    server.generate(text="hello", sampling_params=GREEDY)
    text = server.client.get("/metrics").text
    return set(re.findall(r"^(sglang:\w+){", text, flags=re.M)) | set(
        re.findall(r"^# TYPE (sglang:\w+) ", text, flags=re.M)
    )


def test_every_promised_name_is_there(scrape):
    assert [name for name in PROMISED if f"sglang:{name}" not in scrape] == []


@pytest.mark.parametrize(
    "file", ["deploy/grafana/sgl-jax.json", "deploy/prometheus/alerts.yml", "docs/metrics.md"]
)
def test_files_name_only_what_exists(scrape, file):
    names = set(re.findall(r"sglang:\w+", (ROOT / file).read_text()))
    assert len(names) > 5
    assert names - scrape == set()


def test_dashboard_is_valid_and_covers_the_pools():
    board = json.loads((ROOT / "deploy/grafana/sgl-jax.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == 12
    assert all(
        target["expr"].count("(") == target["expr"].count(")")
        for p in board["panels"]
        for target in p["targets"]
    )
