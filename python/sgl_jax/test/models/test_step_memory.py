"""The compiled step leaves donated pools in place and needs memory for live tokens only.

Everything is lowered from abstract arrays: nothing of this size is allocated.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.layers.attention.backend import LayerKV
from sgl_jax.srt.layers.attention.metadata import AttentionMetadata, AttentionShape, PoolView
from sgl_jax.srt.models.inputs import ModelInputs
from sgl_jax.srt.models.registry import build_model
from sgl_jax.test.models.paged_engine import REFS

POOL_TOKENS = 1 << 16


def compiled_step(page: int, seqs: int, tokens: int, block_rows: int, context: int):
    """(compiled step, pool bytes, pages of a pool) of the Gemma 4 reference at W = 32."""
    config = ModelConfig.from_path(REFS / "gemma4-tiny")
    mesh = jax.make_mesh(
        (1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1]
    )
    graph, weights = nnx.split(build_model(config, mesh))
    layout = NamedSharding(mesh, P("data", None, "tensor"))
    pages = POOL_TOKENS // page + 1
    kv = tuple(
        LayerKV(*(jax.ShapeDtypeStruct((pages, page, 64), jnp.float32, sharding=layout),) * 2)
        for _ in config.layer_pattern
    )

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), jnp.int32)

    view = PoolView(ints(tokens), ints(seqs * -(-context // page)), ints(seqs))
    blocks = AttentionShape(tokens, seqs, block_rows, 0).blocks
    meta = AttentionMetadata(ints(4, blocks), ints(tokens), view, view, block_rows)
    inputs = ModelInputs(ints(tokens), ints(tokens), ints(seqs), meta)
    step = jax.jit(lambda w, i, kv: nnx.merge(graph, w)(i, kv), donate_argnums=(2,))
    pool_bytes = sum(int(np.prod(x.shape)) * 4 for x in jax.tree.leaves(kv))
    return step.lower(weights, inputs, kv).compile(), pool_bytes, pages


@pytest.mark.parametrize("page", [1, 16, 256])
def test_pools_are_updated_in_place(page):
    compiled, pool_bytes, pages = compiled_step(page, seqs=8, tokens=8, block_rows=1, context=4096)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 100
    copies = re.findall(rf"f32\[{pages},.*? copy\(", compiled.as_text())
    assert copies == []


def test_memory_does_not_grow_with_the_context():
    """Eight times the context: only the page list (its argument) grows, 4 bytes a page and sequence."""
    short = compiled_step(16, seqs=4, tokens=64, block_rows=32, context=512)[0].memory_analysis()
    long = compiled_step(16, seqs=4, tokens=64, block_rows=32, context=4096)[0].memory_analysis()
    more_pages = 4 * (4096 - 512) // 16
    assert long.temp_size_in_bytes - short.temp_size_in_bytes <= 4 * 4 * more_pages
