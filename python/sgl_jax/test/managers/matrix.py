"""One corner of the equality matrix: every route, overlap on and off, chunked and whole, on one compiled worker (DECISIONS 21).

The whole: {unified, legacy, chunk} x {page 1, 128, 256} x {overlap} x {DP1, DP2} x {chunked}, windows below and above a page
where that is possible. Token equality is asserted on checked-in prompts with a margin (DECISIONS 20).

Run as a module it prints the results as JSON, so that a corner with several virtual devices gets a process of its own:
``python -m sgl_jax.test.managers.matrix PAGE WINDOW DP``.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.managers.build import build_scheduler
from sgl_jax.srt.managers.io_struct import (
    ControlReq,
    GenerateReq,
    Reply,
    SamplingParams,
    ToFrontEnd,
    TokenBatch,
)
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.model_executor.worker import ModelWorker
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.models.reference_prompts import CHECKPOINT, reference_prompts

ROUTES = ("unified", "legacy", "chunk")
#: (page, window)
CORNERS = [(1, 32), (128, 32), (128, 160), (256, 160), (256, 300)]
CONTEXT = 640
CHUNK = 256
NEW_TOKENS = 12
SEATS = 8

#: Prompts on which token equality is asserted here (DECISIONS 20), by role.
TOGETHER = ("pages_384", "short", "window_minus_1", "window_plus_1", "shared_a", "page_256")
#: One after the other: shared prefixes, divergence inside the window, continuations, and re-sends of exact k pages (D13, D85).
IN_TURN = (
    "shared_b",
    "diverge_in_window",
    "shared_256",
    "continuation",
    "page_256",
    "pages_384",
    "page_128",
    "page_128",
    "past_page_128",
)
RETRACTED = ("shared_a", "page_128", "window")


@dataclass
class CaseResult:
    """What a case generated and hit. ``wrong`` names every output that differs from the reference."""

    route: str
    overlap: bool
    chunked: bool
    hits: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unbalanced: list[str] = field(default_factory=list)
    retracted: int = 0


def arguments(
    page: int, dp: int, route: str = "unified", *, overlap: bool = True, chunked: bool = True
) -> ServerArgs:
    return ServerArgs(
        model_path=str(CHECKPOINT),
        device="cpu",
        tp_size=dp,
        dp_size=dp,
        page_size=page,
        context_length=CONTEXT,
        max_total_tokens=8192 * dp,
        swa_full_tokens_ratio=1.0,
        max_running_requests=SEATS * dp,
        chunked_prefill_size=CHUNK if chunked else -1,
        disable_radix_cache=route == "chunk",
        enable_unified_radix_tree=route == "unified",
        disable_overlap_schedule=not overlap,
        skip_tokenizer_init=True,
        debug_cache=True,
        log_level="error",
    )


def build_worker(page: int, window: int, dp: int) -> ModelWorker:
    """One worker for all cases of a corner: whole prompts fit a step, two compiled shapes."""
    base = arguments(page, dp, chunked=False)
    given = {name: getattr(base, name) for name, source in base.provenance.items() if source == "user"}
    args = ServerArgs(**given, precompile_token_paddings=(CONTEXT,), precompile_bs_paddings=(SEATS,))
    overrides = {"dtype": "float32", "context_length": CONTEXT, "sliding_window": window}
    return ModelWorker(args, ModelConfig.from_path(CHECKPOINT, overrides))


class Driver:
    """Sends the reference prompts to one scheduler and compares what comes back."""

    def __init__(
        self, scheduler: Scheduler, window: int, result: CaseResult, inbox: list[ToFrontEnd]
    ) -> None:
        self.scheduler = scheduler
        self.result = result
        self.inbox = inbox
        self.known = {item.name: item for item in reference_prompts(window)}
        self.sent: dict[str, str] = {}

    def submit(self, name: str) -> None:
        rid = f"{len(self.sent)}:{name}"
        rank = len(self.sent) % self.scheduler.config.dp_size
        self.sent[rid] = name
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        self.scheduler.handle(
            GenerateReq(rid=rid, input_ids=self.known[name].prompt, sampling=sampling, dp_rank=rank)
        )

    def settle(self, phase: str) -> None:
        """Run until idle, compare outputs, note hits, and check the books of every rank."""
        self.scheduler.run_until_idle(10_000)
        outputs: dict[str, list[int]] = {}
        for message in self.inbox:
            if isinstance(message, TokenBatch):
                for out in message.outs:
                    outputs.setdefault(out.rid, []).extend(out.token_ids)
                    if out.finish is not None:
                        self.result.hits.append(out.cached_tokens)
        self.inbox.clear()
        for rid, tokens in outputs.items():
            want = self.known[self.sent[rid]].output[:NEW_TOKENS]
            if tokens != want:
                self.result.wrong.append(f"{phase} {rid}: {tokens} != {want}")
        self.result.unbalanced += [str(v) for v in self.scheduler.idle.violations(require_idle=True)]

    def control(self, kind: str, **args: Any) -> None:
        self.scheduler.handle(ControlReq(kind=kind, req_id="m", args=args))
        for message in self.inbox:
            if isinstance(message, Reply) and not message.ok:
                self.result.unbalanced.append(str(message.data))


def run_case(
    worker: ModelWorker, page: int, window: int, dp: int, case: tuple[str, bool, bool]
) -> CaseResult:
    route, overlap, chunked = case
    result = CaseResult(route, overlap, chunked)
    inbox: list[ToFrontEnd] = []
    args = arguments(page, dp, route, overlap=overlap, chunked=chunked)
    scheduler = build_scheduler(args, worker=worker, send=inbox.append)
    driver = Driver(scheduler, window, result, inbox)
    for name in TOGETHER:
        driver.submit(name)
    driver.settle("together")
    result.hits.clear()  # who finished first decides these
    for name in IN_TURN:
        for _ in range(dp):
            driver.submit(name)
        driver.settle("in turn")
    for name in RETRACTED * dp:
        driver.submit(name)
    for _ in range(5):
        scheduler.step()
    driver.control("pause", mode="retract")
    driver.control("continue")
    hits = list(result.hits)
    driver.settle("retracted")
    result.hits = hits
    result.retracted = sum(scheduler.counters.retracted)
    driver.control("flush_cache")
    return result


def run_corner(page: int, window: int, dp: int) -> list[CaseResult]:
    """All cases of (page, window, dp)."""
    worker = build_worker(page, window, dp)
    cases = itertools.product(ROUTES, (True, False), (True, False))
    return [run_case(worker, page, window, dp, case) for case in cases]


# ---------------------------------------------------------------------------------------------------------------- the tests
def corner_in_a_process(page: int, window: int, dp: int) -> list[CaseResult]:
    """The corner in a process of its own, with as many virtual devices as ranks."""
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={dp}"}
    command = [sys.executable, "-m", "sgl_jax.test.managers.matrix", str(page), str(window), str(dp)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550)
    if done.returncode:
        raise AssertionError(done.stderr[-4000:])
    return [CaseResult(**entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def check_corner(page: int, window: int, dp: int) -> None:
    """The twelve cases of a corner generate the reference, keep their books, were retracted, and hit alike.

    Without memory pressure the two trees hit the same, the chunk cache nothing, and overlap changes no hit.
    """
    results = corner_in_a_process(page, window, dp)
    found = {(r.route, r.overlap, r.chunked): r for r in results}
    expect(len(results) == len(found) == 12, sorted(found))
    for what in ("wrong", "unbalanced"):
        bad = {case: getattr(r, what) for case, r in found.items() if getattr(r, what)}
        expect(bad == {}, f"{what}: {bad}")
    expect(all(r.retracted >= dp for r in results), [r.retracted for r in results])
    for chunked in (True, False):
        hits = {route: found[route, True, chunked].hits for route in ROUTES}
        expect(hits["unified"] == hits["legacy"], hits)
        expect(sum(hits["unified"]) > 0 and sum(hits["chunk"]) == 0, hits)
        for route in ROUTES:
            alike = found[route, False, chunked].hits
            expect(hits[route] == alike, f"{route}: overlap on {hits[route]}, off {alike}")


def expect(condition: bool, shown: object) -> None:
    """An assertion that says what it saw; this module is not rewritten by pytest."""
    if not condition:
        raise AssertionError(shown)


if __name__ == "__main__":
    corner = [int(word) for word in sys.argv[1:4]]
    print(json.dumps([asdict(result) for result in run_corner(*corner)]))
