"""From sharded activations and pools to rank-local attention: KV write and attention in one ``shard_map``.

Pools are global arrays ``[dp * (pages_per_rank + 1), page, kv_heads * d]`` laid out ``P("data", None, "tensor")``: every rank sees its own
pages with its own page 0, every device its own heads. Loc and page ids are rank-local and need no translation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.configs.layer_spec import AttentionSpec
from sgl_jax.srt.layers.attention.metadata import AttentionMetadata
from sgl_jax.srt.layers.attention.native import AttentionOptions, paged_attention, write_kv
from sgl_jax.srt.layers.sharding import DATA, TENSOR


class LayerKV(NamedTuple):
    """K and V pool of one layer: [pages, page, kv_heads * head_dim], [pages, page, kv_heads * v_head_dim]."""

    k: jax.Array
    v: jax.Array


#: name of --attention-backend -> rank-local kernel with ``paged_attention``'s signature
BACKENDS: dict[str, Callable[..., jax.Array]] = {"native": paged_attention}


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention of one layer kind over its pool. Static and hashable; holds no arrays.

    Window layers use the step's SWA page view where it has one; a model with a single pool keeps them in the full pool.
    Raises ValueError for an unknown backend name.
    """

    mesh: Mesh
    spec: AttentionSpec
    backend: str = "native"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(
                f"--attention-backend {self.backend!r} is not available; choose one of {', '.join(BACKENDS)}"
            )

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerKV,
        meta: AttentionMetadata,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerKV]:
        """Write K/V of the step's tokens, then attend.

        q [dp, T, q_heads, dk], k [dp, T, kv_heads, dk], v [dp, T, kv_heads, dv]; KV heads as stored (replicas included).
        Returns out [dp, T, q_heads * dv] and the updated pools.
        """
        spec, kernel = self.spec, BACKENDS[self.backend]
        options = AttentionOptions(spec.scale, spec.window, spec.soft_cap)
        view = meta.full if spec.window is None or meta.swa is None else meta.swa

        def local(q, k, v, k_pool, v_pool, blocks, tok_row, loc, pages, base, sinks):  # type: ignore[no-untyped-def]
            k_pool = write_kv(k_pool, k[0].reshape(k.shape[1], -1), loc[0])
            v_pool = write_kv(v_pool, v[0].reshape(v.shape[1], -1), loc[0])
            out = kernel(
                q[0],
                (k_pool, v_pool),
                blocks[0],
                tok_row[0],
                (pages[0], base[0]),
                meta.block_rows,
                options,
                sinks,
            )
            return out.reshape(1, out.shape[0], -1), k_pool, v_pool

        heads, pool, row = P(DATA, None, TENSOR, None), P(DATA, None, TENSOR), P(DATA, None)
        out, k_pool, v_pool = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, pool, pool, P(DATA, None, None), row, row, row, row, P(TENSOR)),
            out_specs=(P(DATA, None, TENSOR), pool, pool),
            check_vma=False,
        )(q, k, v, cache.k, cache.v, meta.blocks, meta.tok_row, view.loc, view.pages, view.base, sinks)
        return out, LayerKV(k_pool, v_pool)
