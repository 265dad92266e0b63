"""Greedy tokens of one family on 4 virtual CPU devices; run as a script by test_mesh_parity.py.

usage: python -m sgl_jax.test.models.mesh_parity FAMILY DP TP
"""

from __future__ import annotations

import sys

import numpy as np

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.test.models.paged_engine import REFS, PagedEngine, Sequence, expected


def main(family: str, dp: int, tp: int) -> None:
    config = ModelConfig.from_path(REFS / f"{family}-tiny")
    engine, ref = PagedEngine(config, 16, tokens=96, dp=dp, tp=tp), expected(family)
    steps = 40  # 48 + 40 tokens: well past the window of 32
    seqs = [Sequence(rank=i % dp) for i in range(3)]
    tokens = engine.greedy(seqs, ref["greedy_prompts"], steps, chunk=32)
    np.testing.assert_array_equal(tokens, ref["greedy_tokens"][:, :steps])
    for i, layer in enumerate(engine.kv):
        spec = config.layer_spec(i)
        local = layer.k.addressable_shards[0].data.shape
        heads = max(1, spec.num_kv_heads // tp)
        want = (engine.pages_per_rank + 1, engine.page, heads * spec.head_dim)
        assert local == want, f"layer {i}: shard {local}, expected {want}"
    print("equal", family, dp, tp)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
