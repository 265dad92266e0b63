"""A rank's pools and page lists for attention tests: shuffled pages, NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.layers.attention.metadata import (
    AttentionMetadata,
    AttentionShape,
    build_attention_metadata,
    check_queries,
)
from sgl_jax.srt.layers.attention.native import AttentionOptions, paged_attention, write_kv
from sgl_jax.srt.layers.attention.reference import dense_attention


@dataclass(frozen=True)
class Queries:
    """One rank's step for a single pool, shaped like the scheduler's RankInputs."""

    extend_lens: np.ndarray
    seq_lens: np.ndarray
    full_loc: np.ndarray
    full_pages: np.ndarray
    full_page_start: np.ndarray
    swa_loc: np.ndarray | None = None
    swa_pages: np.ndarray | None = None
    swa_page_start: np.ndarray | None = None
    swa_first_page: np.ndarray | None = None


@dataclass(frozen=True)
class Geometry:
    page: int
    q_heads: int = 4
    kv_heads: int = 2
    dk: int = 8
    dv: int = 6
    window: int | None = None
    soft_cap: float | None = None
    scale: float = 0.35


class PagedSequences:
    """Sequences of given final lengths in one pool. K, V and Q of every position are drawn once."""

    def __init__(self, lengths: list[int], geo: Geometry, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.geo, self.lengths = geo, lengths
        f32 = np.float32
        self.q = [rng.standard_normal((n, geo.q_heads, geo.dk)).astype(f32) for n in lengths]
        self.k = [rng.standard_normal((n, geo.kv_heads, geo.dk)).astype(f32) for n in lengths]
        self.v = [rng.standard_normal((n, geo.kv_heads, geo.dv)).astype(f32) for n in lengths]
        counts = [-(-n // geo.page) for n in lengths]
        self.num_pages = sum(counts)
        ids = rng.permutation(np.arange(1, self.num_pages + 1)).astype(np.int32)
        self.pages = np.split(ids, np.cumsum(counts)[:-1])
        # Few array shapes, hence few compilations: pools, page lists and token counts are rounded up.
        self.capacity = _bucket(self.num_pages, (8, 64, 600))
        shape = (self.capacity + 1, geo.page)
        self.k_pool = jnp.full((*shape, geo.kv_heads * geo.dk), jnp.nan, jnp.float32)
        self.v_pool = jnp.full((*shape, geo.kv_heads * geo.dv), jnp.nan, jnp.float32)

    def slots(self, seq: int, start: int, end: int) -> np.ndarray:
        position = np.arange(start, end)
        return (self.pages[seq][position // self.geo.page] * self.geo.page + position % self.geo.page).astype(
            np.int32
        )

    def queries(self, spans: list[tuple[int, int, int]]) -> Queries:
        """``spans``: (sequence, start, end) of the tokens of a step."""
        owned = [self.pages[s][: -(-end // self.geo.page)] for s, _, end in spans]
        return Queries(
            extend_lens=np.array([end - start for _, start, end in spans], np.int32),
            seq_lens=np.array([end for _, _, end in spans], np.int32),
            full_loc=np.concatenate([self.slots(*span) for span in spans]),
            full_pages=np.concatenate(owned),
            full_page_start=np.concatenate([[0], np.cumsum([len(p) for p in owned])]).astype(np.int32),
        )

    def run(
        self, spans: list[tuple[int, int, int]], block_rows: int, sinks: np.ndarray | None = None
    ) -> np.ndarray:
        """One step through the paged path -> [T, q_heads, dv]; updates the pools."""
        step = self.queries(spans)
        check_queries(step, self.geo.page, None, self.num_pages)
        live = int(step.extend_lens.sum())
        tokens = _bucket(live + 1, (8, 48, 600))  # some padding everywhere
        shape = AttentionShape(tokens, 4, block_rows, self.capacity)
        meta = build_attention_metadata([step], shape)
        q, k, v = (
            np.concatenate(
                [source[s][a:b] for s, a, b in spans]
                + [np.ones((tokens - live, *source[0].shape[1:]), np.float32)]
            )
            for source in (self.q, self.k, self.v)
        )
        options = AttentionOptions(self.geo.scale, self.geo.window, self.geo.soft_cap)
        out, self.k_pool, self.v_pool = _step(q, k, v, self.k_pool, self.v_pool, meta, sinks, options)
        return np.asarray(out)

    def dense(self, spans: list[tuple[int, int, int]], sinks: np.ndarray | None = None) -> np.ndarray:
        geo = self.geo
        return np.concatenate(
            [
                dense_attention(
                    self.q[s][a:b], self.k[s][:b], self.v[s][:b], geo.scale, geo.window, geo.soft_cap, sinks
                )
                for s, a, b in spans
            ]
        )


def _bucket(need: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= need)


def _write_and_attend(q, k, v, k_pool, v_pool, meta: AttentionMetadata, sinks, options):
    loc = meta.full.loc[0]
    k_pool = write_kv(k_pool, k.reshape(k.shape[0], -1), loc)
    v_pool = write_kv(v_pool, v.reshape(v.shape[0], -1), loc)
    table = (meta.full.pages[0], meta.full.base[0])
    out = paged_attention(
        q, (k_pool, v_pool), meta.blocks[0], meta.tok_row[0], table, meta.block_rows, options, sinks
    )
    return out, k_pool, v_pool


_step = jax.jit(_write_and_attend, static_argnames="options", donate_argnums=(3, 4))
