"""One token through the whole path: the server's own check. Knows no HTTP."""

from __future__ import annotations

from sgl_jax.srt.entrypoints.sequences import new_rid
from sgl_jax.srt.managers.io_struct import GenerateReq, SamplingParams
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager


async def generate_one_token(manager: TokenizerManager) -> None:
    """Kept out of the metrics. Raises RequestError when it fails."""
    request = GenerateReq(
        rid="health-" + new_rid(), input_ids=[0], sampling=SamplingParams(max_new_tokens=1, temperature=0.0)
    )
    await manager.finish(await manager.submit(request, counted=False))
