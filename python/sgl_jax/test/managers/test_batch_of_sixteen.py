"""All reference prompts of a window alone, then as one batch of 16, cold and warm: the float64 oracle's 32 tokens each time (DECISIONS 20)."""

from __future__ import annotations

import functools

import pytest

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.managers.build import build_scheduler
from sgl_jax.srt.managers.io_struct import ControlReq, GenerateReq, Reply, SamplingParams, TokenBatch
from sgl_jax.srt.model_executor.worker import ModelWorker
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.models.reference_prompts import CHECKPOINT, reference_prompts

PAGE, WINDOW, CONTEXT = 16, 32, 1024


def arguments(**given) -> ServerArgs:
    return ServerArgs(
        model_path=str(CHECKPOINT),
        device="cpu",
        page_size=PAGE,
        context_length=CONTEXT,
        max_total_tokens=16 * CONTEXT,
        swa_full_tokens_ratio=1.0,
        max_running_requests=16,
        enable_unified_radix_tree=True,
        skip_tokenizer_init=True,
        debug_cache=True,
        log_level="error",
        **given,
    )


@functools.cache
def worker() -> ModelWorker:
    args = arguments(
        chunked_prefill_size=-1, precompile_token_paddings=(CONTEXT,), precompile_bs_paddings=(16,)
    )
    overrides = {"dtype": "float32", "context_length": CONTEXT, "sliding_window": WINDOW}
    return ModelWorker(args, ModelConfig.from_path(CHECKPOINT, overrides))


class Client:
    """Sends prompts together and collects what each generated; ``most`` is the largest number that ran side by side."""

    def __init__(self, args: ServerArgs) -> None:
        self.inbox: list = []
        self.scheduler = build_scheduler(args, worker=worker(), send=self.inbox.append)
        self.most = 0

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        for rid, prompt in zip(outputs, prompts):
            sampling = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
            self.scheduler.handle(GenerateReq(rid=rid, input_ids=prompt, sampling=sampling))
        while self.scheduler.step():
            self.most = max(self.most, int(self.scheduler.roster.seats[0].decoding.sum()))
        for message in self.inbox:
            if isinstance(message, TokenBatch):
                for out in message.outs:
                    outputs[out.rid] += out.token_ids
        self.inbox.clear()
        return list(outputs.values())

    def flush(self) -> None:
        self.scheduler.handle(ControlReq(kind="flush_cache", req_id="f"))
        (reply,) = (m for m in self.inbox if isinstance(m, Reply))
        assert reply.ok, reply.data
        self.inbox.clear()


@pytest.mark.parametrize("overlap", [True, False])
def test_alone_and_in_a_batch_of_16(overlap):
    """D75: the canary of a reused prefix: cold and warm ids are equal, alone and side by side."""
    known = reference_prompts(WINDOW)
    client = Client(arguments(chunked_prefill_size=128, disable_overlap_schedule=not overlap))
    for item in known:
        assert client.generate([item.prompt]) == [item.output], item.name
        client.flush()
    assert client.most == 1
    for _ in ("cold", "warm"):
        outputs = client.generate([item.prompt for item in known])
        assert [i.name for i, out in zip(known, outputs) if out != i.output] == []
    assert client.most == 16
    client.flush()
