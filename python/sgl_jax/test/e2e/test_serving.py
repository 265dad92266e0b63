"""The whole server, as a user starts it, on the tiny Gemma-4 checkpoint: chat, cache hits, load, drain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import queue
import random
import re
from pathlib import Path

import httpx
import openai
import pytest

from sgl_jax.test.entrypoints.running import REAL, paused_in_decode, running, wait_until
from sgl_jax.tools.ledger_view import main as ledger_command

PAGE = 16
FLAGS = (
    "--enable-unified-radix-cache",
    "--enable-cache-report",
    "--enable-metrics",
    "--debug-cache",
    *("--page-size", str(PAGE), "--context-length", "384", "--chunked-prefill-size", "64"),
    *("--max-total-tokens", "768", "--max-running-requests", "8", "--max-queued-requests", "64"),
    *("--schedule-conservativeness", "0.1"),
)
ROOT = Path(__file__).resolve().parents[4]
METRICS = [
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
    "swa_evicted_tokens_total",
    "tombstoned_tokens_total",
    "healed_tokens_total",
    "full_hit_swa_short_tokens_total",
    "swa_lock_held_tokens",
    "reclaim_lag_tokens",
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
LONG = "The sea was calm, the boats came home, and the children counted them one by one. "
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with running(REAL, *FLAGS, seconds=300) as live:
        yield live


@pytest.fixture
def cold(server):
    assert server.client.get("/flush_cache?timeout=30").status_code == 200
    return server


def ledger(server):
    view = server.client.get("/get_cache_ledger").json()
    assert view["violations"] == []
    return view["ranks"][0]


def cached_total(server):
    text = server.client.get("/metrics").text
    return float(
        re.search(r'^sglang:cached_tokens_total{dp_rank="0",model_name="tiny"} (\S+)$', text, flags=re.M)[1]
    )


def test_chat_twice_hits_everywhere(cold):
    """The same chat again: cached_tokens > 0 in usage, stream usage, meta_info and counter; the same words."""
    before = cached_total(cold)
    with openai.OpenAI(base_url=cold.url + "/v1", api_key="none") as client:
        ask = {
            "model": "tiny",
            "messages": [{"role": "user", "content": LONG * 2}],
            "max_tokens": 12,
            "temperature": 0,
        }
        first, second = (client.chat.completions.create(**ask) for _ in range(2))
        chunks = list(
            client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    hit = second.usage.prompt_tokens_details.cached_tokens
    assert hit > 0 and hit % PAGE == 0
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == hit
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert first.choices[0].message.content == second.choices[0].message.content == streamed
    assert cached_total(cold) - before == 2 * hit


def test_same_ids_cold_and_warm(cold):
    answers = [cold.generate(text=LONG * 2, sampling_params=GREEDY) for _ in range(2)]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert [a["meta_info"]["cached_tokens"] > 0 for a in answers] == [False, True]
    longer = cold.generate(text=LONG * 3, sampling_params=GREEDY)
    assert longer["meta_info"]["cached_tokens"] > 0


def test_cache_namespaces(cold):
    for key, hits in (("a", False), ("a", True), ("b", False)):
        meta = cold.generate(text=LONG, sampling_params=GREEDY, extra_key=key)["meta_info"]
        assert (meta["cached_tokens"] > 0) is hits


def test_stream_equals_plain(cold):
    """The last part is the plain answer, and earlier ones arrive while the request is still being decoded."""
    body = {"text": LONG, "sampling_params": {**GREEDY, "max_new_tokens": 120}}
    plain = cold.generate(**body)
    lines: queue.Queue[str] = queue.Queue()

    def read():
        lines.queue.clear()
        with cold.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                lines.put(line)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = paused_in_decode(cold, pool, read)
        try:
            early = [json.loads(lines.get(timeout=60)[6:])]
            assert not stream.done()
        finally:
            cold.post("/continue_generation", {})
        stream.result(60)
    *late, done = [line for line in lines.queue if line]
    parts = early + [json.loads(line[6:]) for line in late]
    assert done == "data: [DONE]"
    finished = [part["meta_info"]["finish_reason"] is not None for part in parts]
    assert finished == [False] * (len(parts) - 1) + [True]
    assert all(
        a["output_ids"] == b["output_ids"][: len(a["output_ids"])] for a, b in itertools.pairwise(parts)
    )
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (plain["text"], plain["output_ids"])


def test_stop_string_and_seed(cold):
    text = cold.generate(text=LONG, sampling_params={**GREEDY, "max_new_tokens": 40})["text"]
    stop = text[8:11]
    cut = cold.generate(text=LONG, sampling_params={**GREEDY, "max_new_tokens": 40, "stop": stop})
    assert cut["text"] == text[: text.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    seeded = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    assert (
        cold.generate(text=LONG, sampling_params=seeded)["output_ids"]
        == cold.generate(text=LONG, sampling_params=seeded)["output_ids"]
    )


def test_echo_with_logprobs(cold):
    body = {"prompt": "one two three", "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0}
    logprobs = cold.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    assert logprobs["top_logprobs"][-1][logprobs["tokens"][-1]] == max(logprobs["top_logprobs"][-1].values())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input_ids": [5] * 384}, "the limit is"),
        ({"input_ids": [5] * 300, "sampling_params": {"max_new_tokens": 100}}, "context length 384"),
        ({"text": "x", "dp_rank": 7}, "dp_rank is 7"),
        ({"text": "x", "sampling_params": {"top_p": 0}}, "top_p is 0"),
        ({"text": ["x"], "rid": 5}, "rid is 5"),
    ],
)
def test_bad_input_is_400(server, body, said):
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_server_info_names_route_and_sources(server):
    info = server.client.get("/get_server_info").json()
    assert info["cache_route"]["impl"] == "UnifiedRadixCache(FULL,SWA)"
    assert info["cache_route"]["predicate"]["new_route"] is True
    assert info["arguments"]["page_size"] == {"value": 16, "source": "user", "note": "--page-size"}
    assert info["arguments"]["dtype"]["effective"] == "float32"
    assert info["capacities"] == [{"dp_rank": 0, "full": 768, "swa": 608}]
    assert (
        "Tree cache initialized: impl=UnifiedRadixCache(FULL,SWA) hybrid_swa=True route=unified_swa"
        in server.log()
    )
    assert "KV plan: page size 16" in server.log()


class Load:
    """500 requests of mixed kinds against one server; remembers status codes."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)
        self.gate = asyncio.Semaphore(20)
        self.codes: dict[int, int] = {}
        self.done = 0

    def prompt(self) -> list[int]:
        """Shared prefixes of several lengths, diverging tails, now and then a long one."""
        rng = self.random
        family = rng.randrange(5)
        prefix = [20 + (family * 31 + i * 7) % 300 for i in range(rng.choice([0, 16, 40, 96]))]
        tail = [20 + rng.randrange(300) for _ in range(rng.choice([1, 5, 20, 33]))]
        return prefix + tail if rng.random() > 0.08 else prefix + tail * 6

    def body(self, number: int) -> dict:
        rng = self.random
        sampling = {
            "max_new_tokens": rng.choice([1, 8, 24, 60]),
            "temperature": rng.choice([0, 1]),
            "ignore_eos": rng.random() < 0.7,
        }
        return {"input_ids": self.prompt(), "rid": f"load-{number}", "sampling_params": sampling}

    async def one(self, number: int) -> None:
        body, kind = self.body(number), self.random.random()
        async with self.gate:
            try:
                if kind < 0.55:
                    await self.plain(body)
                elif kind < 0.7:
                    await self.stream_and_leave(body)
                elif kind < 0.8:
                    await self.client.post("/generate", json=body, timeout=0.05)
                elif kind < 0.92:
                    task = asyncio.create_task(self.plain(body))
                    await asyncio.sleep(self.random.random() * 0.2)
                    await self.client.post("/abort_request", json={"rid": body["rid"]})
                    await task
                else:
                    await self.plain({**body, "input_ids": [5] * 500})
            except httpx.TimeoutException:
                pass  # this client left
        self.done += 1

    async def plain(self, body: dict) -> None:
        answer = await self.client.post("/generate", json=body)
        self.codes[answer.status_code] = self.codes.get(answer.status_code, 0) + 1

    async def stream_and_leave(self, body: dict) -> None:
        async with self.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
            lines = self.random.randrange(1, 6)
            async for line in answer.aiter_lines():
                lines -= bool(line)
                if not lines:
                    return

    async def run(self, count: int) -> None:
        """Mixed requests, then a burst whose outputs outgrow the pool, so that some are retracted and come back."""
        await asyncio.gather(*(self.one(n) for n in range(count - 8)))
        sampling = {"max_new_tokens": 160, "ignore_eos": True}
        burst = ({"input_ids": [20 + n] * 30, "sampling_params": sampling} for n in range(8))
        await self.client.post("/pause_generation", json={"mode": "in_place"})
        tasks = [asyncio.create_task(self.plain(body)) for body in burst]
        async with asyncio.timeout(
            60
        ):  # until what departed clients left has ended: the eight start together
            while await self.numbers() != (0, 8):
                await asyncio.sleep(0.01)
        await self.client.post("/continue_generation", json={})
        await asyncio.gather(*tasks)
        self.done += 8

    async def numbers(self) -> tuple[int, int]:
        load = (await self.client.get("/get_load")).json()[0]
        return load["num_running_reqs"], load["num_queue_reqs"]


def test_500_mixed_requests_leave_nothing_behind(cold):
    """Shared prefixes, aborts, disconnects, retractions, long prompts on tiny pools: idle and balanced afterwards."""

    async def drive() -> Load:
        async with httpx.AsyncClient(
            base_url=cold.url, timeout=120, limits=httpx.Limits(max_connections=40)
        ) as client:
            load = Load(client, seed=1)
            await load.run(500)
            return load

    load = asyncio.run(drive())
    assert load.done == 500
    assert set(load.codes) == {200, 400} and load.codes[400] > 20
    wait_until(lambda: cold.client.get("/get_cache_ledger").json()["idle"])
    state = ledger(cold)
    for pool in ("full", "swa"):
        assert state[f"{pool}_tree_protected"] == 0, "a lock was left"
        assert state[f"{pool}_request_owned"] == 0
        assert state[f"{pool}_available"] + state[f"{pool}_tree_evictable"] == state[f"{pool}_capacity"]
    report = cold.client.get("/flush_cache?format=json").json()
    assert report["success"] is True
    for pool, capacity in (("full", 768), ("swa", 608)):
        entry = report["ranks"][0]["pools"][pool]
        assert (entry["leaked"], entry["available"], entry["capacity"]) == (0, capacity, capacity)
    info = cold.client.get("/get_server_info").json()
    assert info["open_requests"] == 0
    counters = info["internal_states"][0]["counters"]
    assert counters["full_evicted_total"][0] > 0 and counters["num_retracted_reqs"][0] > 0
    assert "Traceback" not in cold.log()


def test_d65_generate_then_flush_at_once(cold):
    """D65: right after the last token a flush with a timeout works every time."""
    for _ in range(20):
        cold.generate(text="hello", sampling_params={"max_new_tokens": 2})
        assert cold.client.get("/flush_cache?timeout=5").status_code == 200


LONG_ANSWER = {"text": LONG, "sampling_params": {**GREEDY, "max_new_tokens": 120}}


@contextlib.contextmanager
def long_request(server):
    """A request, paused in place in the middle of its decode; yields the future of its answer. Leaves nothing behind."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = paused_in_decode(server, pool, lambda: server.generate(**LONG_ANSWER, rid="long"))
        try:
            yield answer
        finally:
            server.post("/continue_generation", {})
            server.post("/abort_request", {"abort_all": True})
            answer.result(60)


def test_pause_modes(cold):
    """D30: in_place keeps memory and place, retract gives both back, abort ends; what goes on says the same words."""
    alone = cold.generate(**LONG_ANSWER)["output_ids"]
    assert cold.pause("nap").status_code == 400
    with long_request(cold) as answer:
        assert cold.pause("in_place").json() == {"success": True, "paused": True, "mode": "in_place"}
        (before,) = cold.live()
        for _ in range(20):  # each call is a turn of the loop, in which it could have made a token
            assert cold.live() == [before] and before["state"] == "decode"
        assert "1 running request(s)" in cold.client.get("/flush_cache").text
        assert cold.pause("retract").status_code == 200
        (waiting,) = cold.live()
        assert (waiting["state"], waiting["wait_reason"]) == ("waiting", "generation is paused")
        held = ledger(cold)
        assert held["full_request_owned"] == held["swa_request_owned"] == held["full_tree_protected"] == 0
        cold.post("/continue_generation", {})
        assert answer.result(60)["output_ids"] == alone
    with long_request(cold) as answer:
        assert cold.pause("abort").status_code == 200
        ended = answer.result(60)["meta_info"]["finish_reason"]
        assert ended["type"] == "abort" and "paused" in ended["message"]
        assert cold.live() == []
    assert cold.client.get("/flush_cache").status_code == 200


def test_d65_d69_a_flush_waits_alone_and_gives_up_in_time(cold):
    """D65, D69: refused with what is pending; one waits, a second is told so; expiry and success leave the server working."""
    alone = cold.generate(**LONG_ANSWER)["output_ids"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool, long_request(cold) as answer:
        refused = cold.client.get("/flush_cache?format=json").json()
        assert refused["success"] is False and refused["pending"] == ["1 running request(s)"]
        expired = cold.client.get("/flush_cache?timeout=1")
        assert expired.status_code == 400 and "did not become idle in time" in expired.text
        two = [pool.submit(cold.client.get, "/flush_cache?timeout=50&format=json") for _ in range(2)]
        told, waits = concurrent.futures.wait(two, 60, concurrent.futures.FIRST_COMPLETED)
        (second,), (first,) = told, waits  # whichever came later
        assert second.result().status_code == 400 and "already in progress" in second.result().text
        assert not answer.done()
        cold.post("/continue_generation", {})
        assert first.result(60).json()["ranks"][0]["pools"]["full"]["leaked"] == 0
        assert answer.result(60)["output_ids"] == alone  # flushed after its end: nothing of it is missing


def test_who_owns_a_slot_on_the_command_line(cold, capsys):
    cold.generate(text=LONG, sampling_params=GREEDY)
    assert ledger_command([cold.url, "--slot", str(PAGE), "--pool", "swa"]) == 0
    out = capsys.readouterr().out
    assert f"rank 0, swa slot {PAGE} — tree: node " in out and out.endswith(
        "sound: every slot has exactly one owner\n"
    )
    assert ledger_command([cold.url, "--slot", "5", "--rank", "3"]) == 2
    assert "rank is '3', must be an integer, at most 0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def scrape(server):
    """Metric names of a live scrape, with the suffixes of histograms and without."""
    server.generate(text="hello", sampling_params=GREEDY)
    text = server.client.get("/metrics").text
    return set(re.findall(r"^(sglang:\w+){", text, flags=re.M)) | set(
        re.findall(r"^# TYPE (sglang:\w+) ", text, flags=re.M)
    )


def test_every_promised_metric_is_there(scrape):
    assert [name for name in METRICS if f"sglang:{name}" not in scrape] == []


@pytest.mark.parametrize(
    "file", ["deploy/grafana/sgl-jax.json", "deploy/prometheus/alerts.yml", "docs/metrics.md"]
)
def test_dashboard_alerts_and_docs_name_only_metrics_that_exist(scrape, file):
    names = set(re.findall(r"sglang:\w+", (ROOT / file).read_text()))
    assert len(names) > 5
    assert names - scrape == set()


def test_dashboard_is_valid():
    board = json.loads((ROOT / "deploy/grafana/sgl-jax.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == 12


def test_sigterm_drains_and_exits_0(server):
    """Last in this file: it ends the module's server."""
    assert server.client.get("/health_generate").status_code == 200
    assert server.terminate() == 0
    assert "Traceback" not in server.log()
