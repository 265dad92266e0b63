"""A scheduler without a model that speaks io_struct: it answers a prompt with the prompt, one token per step.

``extra_key`` asks for trouble: ``hold`` never answers, ``halt`` makes one token and goes on at the next ``continue``, ``late``
does the same and then fails, ``refuse`` ends with 400, ``crash`` raises, ``stuck`` stops the loop without heartbeats.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import zmq
from tokenizers import Tokenizer

from sgl_jax.srt.managers import io_struct
from sgl_jax.srt.managers.io_struct import (
    FinishReason,
    GenerateReq,
    Heartbeat,
    Ready,
    Reply,
    TokenBatch,
    TokenOut,
)
from sgl_jax.srt.server_args import ServerArgs

CONTEXT = 256
VOCAB = 384
SEATS = 4
STEP = 0.004
EOS = 1


@dataclass
class Running:
    req: GenerateReq
    cached: int
    out: list[int] = field(default_factory=list)
    told: bool = False


class FakeScheduler:
    def __init__(self, args: ServerArgs, recv_addr: str, send_addr: str) -> None:
        self.args = args
        self.tokenizer = Tokenizer.from_file(f"{args.tokenizer_path}/tokenizer.json")
        context = zmq.Context()
        self.pull, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.pull.connect(recv_addr)
        self.push.connect(send_addr)
        self.waiting: list[GenerateReq] = []
        self.running: dict[str, Running] = {}
        self.seen: list[list[int]] = []
        self.aborted: list[str] = []
        self.finished = 0
        self.paused = False
        self.loops = 0
        self.beat_at = 0.0
        self.flush: tuple[str, float] | None = None
        self.stop = False

    def send(self, message: io_struct.ToFrontEnd) -> None:
        self.push.send(io_struct.encode(message))

    def run(self) -> None:
        info = {
            "max_total_num_tokens": 1000,
            "swa_max_total_num_tokens": 800,
            "context_len": CONTEXT,
            "max_req_input_len": CONTEXT - 1,
            "vocab_size": VOCAB,
            "route": {"impl": "Fake", "hybrid_swa": True},
            "plan": ["FULL tokens from a fake", "bounded by nothing"],
            "effective": {"dtype": "float32", "chunked_prefill_size": 4096},
        }
        self.send(Ready(info=info))
        while not self.stop or self.running or self.waiting:
            self.loops += 1
            if time.monotonic() - self.beat_at > 0.05:
                self.heartbeat()
            patience = 0 if self.running else 20
            while self.pull.poll(
                patience
            ):  # what is there; a stream of calls must not keep requests from starting
                patience = 0
                self.take(io_struct.decode_to_scheduler(self.pull.recv()))
            if not self.paused:
                self.step()
            self.try_flush()
            if self.running:
                time.sleep(STEP)
        self.push.close(linger=1000)

    def heartbeat(self) -> None:
        self.beat_at = time.monotonic()
        rank = {
            "num_running_reqs": len(self.running),
            "num_queue_reqs": len(self.waiting),
            "token_usage": 0.5,
            "full_token_usage": 0.25,
            "swa_token_usage": 0.5,
            "kv_available_tokens": 900,
        }
        counters = {"evicted_tokens_total": [7], "num_retracted_reqs": [2]}
        self.send(
            Heartbeat(
                loop_count=self.loops, busy=bool(self.running), stats={"ranks": [rank], "counters": counters}
            )
        )

    def take(self, message: io_struct.ToScheduler) -> None:
        if isinstance(message, GenerateReq):
            self.take_request(message)
        elif isinstance(message, io_struct.AbortReq):
            self.take_abort(message)
        elif isinstance(message, io_struct.ShutdownReq):
            self.stop = True
            if not message.drain:
                self.abort_all()
        else:
            self.take_control(message)

    def take_request(self, req: GenerateReq) -> None:
        if req.extra_key == "crash":
            raise RuntimeError("the fake scheduler was asked to crash")
        if req.extra_key == "stuck":
            time.sleep(3600)
        limit = self.args.max_queued_requests
        if req.extra_key == "refuse":
            self.end(
                req,
                FinishReason(type="abort", message="can never fit: 99 > 10 (--max-total-tokens)", status=400),
            )
        elif limit is not None and len(self.running) >= SEATS and len(self.waiting) >= limit:
            self.end(
                req,
                FinishReason(
                    type="abort", message=f"the queue is full (--max-queued-requests {limit})", status=503
                ),
            )
        else:
            self.waiting.append(req)

    def end(self, req: GenerateReq, finish: FinishReason, out: Running | None = None) -> None:
        made = len(out.out) if out else 0
        cached = out.cached if out else 0
        self.send(
            TokenBatch(
                outs=[
                    TokenOut(
                        rid=req.rid,
                        token_ids=[],
                        finish=finish,
                        prompt_tokens=len(req.input_ids),
                        completion_tokens=made,
                        cached_tokens=cached,
                    )
                ]
            )
        )

    def abort(self, rid: str) -> bool:
        self.aborted.append(rid)
        for req in [r for r in self.waiting if r.rid == rid]:
            self.waiting.remove(req)
            self.end(req, FinishReason(type="abort", message="aborted"))
            return True
        run = self.running.pop(rid, None)
        if run is not None:
            self.end(run.req, FinishReason(type="abort", message="aborted"), run)
        return run is not None

    def abort_all(self) -> list[str]:
        rids = [r.rid for r in self.waiting] + list(self.running)
        return [rid for rid in rids if self.abort(rid)]

    def take_abort(self, message: io_struct.AbortReq) -> None:
        found = bool(self.abort_all()) if message.abort_all else self.abort(message.rid)
        if message.req_id:
            self.send(Reply(req_id=message.req_id, ok=True, data={"found": found}))

    def take_control(self, message: io_struct.ControlReq) -> None:
        if message.kind == "flush_cache":
            self.flush = (message.req_id, time.monotonic() + message.args["timeout"])
            return
        data: dict[str, object] = {"message": message.kind}
        if message.kind in ("pause", "continue"):
            self.paused = message.kind == "pause"
            if self.paused and message.args["mode"] == "abort":
                self.abort_all()
            for run in self.running.values():
                run.told = run.told or not self.paused
        elif message.kind == "internal_state":
            state = {"aborted": self.aborted, "finished": self.finished, "running": len(self.running)}
            data = {"ranks": [{**state, "flush_waits": self.flush is not None}]}
        elif message.kind == "load":
            data = {
                "ranks": [
                    {"dp_rank": 0, "num_reqs": len(self.running), "num_waiting_reqs": len(self.waiting)}
                ]
            }
        elif message.kind == "ledger":
            data = {"route": "Fake", "ranks": [{"dp_rank": 0, "full_capacity": 1000}]}
            if message.args.get("slot") == 501:
                data = {"message": "this model has one KV pool", "status": 501}
                self.send(Reply(req_id=message.req_id, ok=False, data=data))
                return
            if message.args:
                data["slot"] = {"asked": message.args, "description": "free"}
        self.send(Reply(req_id=message.req_id, ok=True, data=data))

    def try_flush(self) -> None:
        if self.flush is None:
            return
        req_id, deadline = self.flush
        pending = list(self.running) + [r.rid for r in self.waiting]
        if pending and time.monotonic() < deadline:
            return
        self.flush = None
        if pending:
            data = {"message": f"{len(pending)} request(s) are not finished", "pending": pending}
            self.send(Reply(req_id=req_id, ok=False, data=data))
            return
        self.seen.clear()
        self.send(Reply(req_id=req_id, ok=True, data={"message": "Cache flushed.", "ranks": [{"leaked": 0}]}))

    def step(self) -> None:
        while self.waiting and len(self.running) < SEATS:
            req = self.waiting.pop(0)
            self.running[req.rid] = Running(req, self.hit(req.input_ids))
            self.seen.append(req.input_ids)
        outs = [out for run in list(self.running.values()) if (out := self.token(run)) is not None]
        if outs:
            self.send(TokenBatch(outs=outs))

    def hit(self, ids: list[int]) -> int:
        def common(other: list[int]) -> int:
            return next((i for i, (a, b) in enumerate(zip(ids, other)) if a != b), min(len(ids), len(other)))

        return max([min(common(s), len(ids) - 1) for s in self.seen], default=0)

    def token(self, run: Running) -> TokenOut | None:
        req = run.req
        if req.extra_key == "hold" or (req.extra_key in ("halt", "late") and run.out and not run.told):
            return None
        token = req.input_ids[len(run.out) % len(req.input_ids)]
        run.out.append(token)
        finish = self.finish(run, token)
        first = len(run.out) == 1
        out = TokenOut(
            rid=req.rid,
            token_ids=[token],
            finish=finish,
            prompt_tokens=len(req.input_ids),
            completion_tokens=len(run.out),
            cached_tokens=run.cached,
        )
        if req.return_logprob:
            out.logprobs = [-0.5]
            out.top_logprobs = [[(-0.5 - k, (token + k) % VOCAB) for k in range(req.top_logprobs_num)]]
            if first and req.logprob_start_len >= 0:
                start = req.logprob_start_len
                out.input_logprobs = [None if i == 0 else -float(i) for i in range(start, len(req.input_ids))]
        if finish is not None:
            self.finished += 1
            del self.running[req.rid]
        return out

    def finish(self, run: Running, token: int) -> FinishReason | None:
        params = run.req.sampling
        if run.req.extra_key == "late" and len(run.out) == 3:
            return FinishReason(type="abort", message="out of memory", status=500)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            return FinishReason(type="stop", matched=token)
        text = self.tokenizer.decode(run.out, skip_special_tokens=params.skip_special_tokens)
        for stop in params.stop:
            if stop in text:
                return FinishReason(type="stop", matched=stop)
        return FinishReason(type="length") if len(run.out) >= params.max_new_tokens else None


def run_fake_scheduler(args: ServerArgs, recv_addr: str, send_addr: str) -> None:
    FakeScheduler(args, recv_addr, send_addr).run()
