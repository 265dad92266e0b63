"""``native`` backend: paged attention with online softmax in plain JAX. Runs on any device; rank-local arrays only.

Cost and memory follow the live tokens, never batch x maximum length: groups of query blocks walk their own pages, at least
128 tokens a step (DECISIONS 24), from the first page the block's window touches to the page of its last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

_NEG = -1e30  # finite stand-in for -inf: keeps exp(m_old - m_new) defined before the first visible key
_STEP_TOKENS = 128  # least KV tokens per loop step
_GROUP_ROWS = 128  # query rows worked on at once


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Static part of an attention call. ``window`` = keys a query sees, itself included; None = all before it."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class _Blocks(NamedTuple):
    """One group of query blocks, each array [GB]."""

    seq: jax.Array
    pos0: jax.Array
    rows: jax.Array
    tok0: jax.Array


class _Softmax(NamedTuple):
    """Online softmax state per query row: maximum, denominator [GB, kvh, R] and numerator [GB, kvh, R, dv]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array


def write_kv(pool: jax.Array, values: jax.Array, loc: jax.Array) -> jax.Array:
    """Store K or V of **all** new tokens (D56) in a donated pool; in place under jit.

    pool [pages, page, F], values [T, F], loc [T] slots; padding tokens carry slot 0, which nobody reads.
    """
    pages, page, features = pool.shape
    values = values.astype(pool.dtype)
    if page == 1:  # the reshape below would make XLA copy the pool once a layer
        return pool.at[loc, 0].set(values, mode="drop")
    flat = pool.reshape(pages * page, features)
    return flat.at[loc].set(values, mode="drop").reshape(pool.shape)


def paged_attention(
    q: jax.Array,  # [T, q_heads, dk]
    pools: tuple[jax.Array, jax.Array],  # K [pages, page, kv_heads * dk], V [pages, page, kv_heads * dv]
    blocks: jax.Array,  # [4, NB], AttentionMetadata.blocks of this rank
    tok_row: jax.Array,  # [T]
    table: tuple[jax.Array, jax.Array],  # pages [N], base [S]
    block_rows: int,
    options: AttentionOptions,
    sinks: jax.Array | None = None,  # [q_heads] extra logit per head, no value (D61)
) -> jax.Array:
    """Causal attention of every query token over its sequence's pages; returns [T, q_heads, dv] in q's dtype.

    The K/V of the query tokens themselves are already in the pools. Padding tokens give zeros.
    """
    kv_heads = pools[0].shape[2] // q.shape[2]
    v_dim = pools[1].shape[2] // kv_heads
    per_group = min(blocks.shape[1], max(1, _GROUP_ROWS // block_rows))
    groups = -(-blocks.shape[1] // per_group)
    padded = jnp.pad(blocks, ((0, 0), (0, groups * per_group - blocks.shape[1])))

    def one_group(g: jax.Array | int) -> jax.Array:
        own = _Blocks(*jax.lax.dynamic_slice_in_dim(padded, g * per_group, per_group, axis=1))
        return _attend_group(q, pools, own, table, block_rows, options, sinks)

    if groups == 1:
        out = one_group(0)
    else:
        live = jnp.sum(padded[2] > 0)  # live blocks stand in front
        empty = jnp.zeros((groups * per_group, block_rows, q.shape[1], v_dim), q.dtype)
        out = jax.lax.fori_loop(
            0,
            -(-live // per_group),
            lambda g, acc: jax.lax.dynamic_update_slice_in_dim(acc, one_group(g), g * per_group, axis=0),
            empty,
        )
    rows = out.reshape(-1, q.shape[1], v_dim)
    return jnp.take(rows, tok_row, axis=0, mode="fill", fill_value=0)


def _attend_group(
    q: jax.Array,
    pools: tuple[jax.Array, jax.Array],
    own: _Blocks,
    table: tuple[jax.Array, jax.Array],
    block_rows: int,
    options: AttentionOptions,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of one group of blocks -> [GB, BQ, q_heads, dv]."""
    page = pools[0].shape[1]
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = pools[0].shape[2] // dim
    row = jnp.arange(block_rows)[None]  # [1, BQ]
    queries = jnp.take(q, own.tok0[:, None] + row, axis=0, mode="clip")  # [GB, BQ, heads, dk]
    queries = _rows_by_kv_head(queries, kv_heads)

    end = own.pos0 + own.rows  # keys [begin, end) matter to this block
    begin = jnp.zeros_like(end)
    if options.window is not None:
        begin = jnp.maximum(0, own.pos0 - (options.window - 1))
    first_page = begin // page
    end_page = jnp.where(own.rows > 0, -(-end // page), first_page)
    step_pages = max(1, _STEP_TOKENS // page)
    steps = jnp.max(-(-(end_page - first_page) // step_pages))
    base = jnp.take(table[1], own.seq, mode="clip")
    q_pos = jnp.where(row < own.rows[:, None], own.pos0[:, None] + row, -1)  # [GB, BQ], -1 sees nothing

    def step(carry: tuple[jax.Array, _Softmax]) -> tuple[jax.Array, _Softmax]:
        i, state = carry
        logical = (first_page + i * step_pages)[:, None] + jnp.arange(step_pages)[None]
        ids = jnp.where(logical < end_page[:, None], _page_ids(table[0], base, logical), 0)
        slots = logical[..., None] * page + jnp.arange(page)[None, None]
        key_pos = slots.reshape(logical.shape[0], -1)  # [GB, KB]
        seen = _visible(q_pos, key_pos, options.window)
        k = _gather(pools[0], ids, kv_heads).astype(q.dtype)
        v = _gather(pools[1], ids, kv_heads).astype(q.dtype)
        # Slots nobody may see can hold anything, NaN included; 0 * NaN would leak through the product.
        live = (key_pos >= begin[:, None]) & (key_pos < end[:, None])
        v = jnp.where(live[..., None, None], v, 0)
        return i + 1, _accumulate(state, queries, k, v, seen, options)

    state = _initial_state(own.seq.shape[0], block_rows, kv_heads, heads // kv_heads, pools, sinks)
    _, state = jax.lax.while_loop(lambda c: c[0] < steps, step, (jnp.zeros((), steps.dtype), state))
    out = state.acc / jnp.where(state.total == 0, 1, state.total)[..., None]
    return _rows_by_query_head(out, block_rows).astype(q.dtype)


def _page_ids(pages: jax.Array, base: jax.Array, logical: jax.Array) -> jax.Array:
    return jnp.take(pages, base[:, None] + logical, mode="clip")


def _gather(pool: jax.Array, ids: jax.Array, kv_heads: int) -> jax.Array:
    """Pages ``ids`` [GB, n] of a pool as keys or values [GB, n * page, kvh, d]."""
    rows = jnp.take(pool, ids, axis=0, mode="clip")
    return rows.reshape(ids.shape[0], -1, kv_heads, pool.shape[2] // kv_heads)


def _visible(q_pos: jax.Array, key_pos: jax.Array, window: int | None) -> jax.Array:
    """[GB, BQ, KB]: key at or before the query, and among the last ``window`` keys (mem_cache.window)."""
    query, key = q_pos[:, :, None], key_pos[:, None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _accumulate(
    state: _Softmax, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, options: AttentionOptions
) -> _Softmax:
    """Fold one step of keys into the state. q [GB, kvh, R, dk], k/v [GB, KB, kvh, d], seen [GB, BQ, KB]."""
    scores = jnp.einsum("bhrd,bkhd->bhrk", q, k, preferred_element_type=jnp.float32) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    mask = jnp.repeat(seen, q.shape[2] // seen.shape[1], axis=1)[:, None]  # rows are (BQ, G)
    scores = jnp.where(mask, scores, _NEG)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    decay = jnp.exp(state.top - top)
    weights = jnp.where(mask, jnp.exp(scores - top[..., None]), 0)
    value = jnp.einsum("bhrk,bkhd->bhrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return _Softmax(top, state.total * decay + weights.sum(axis=-1), state.acc * decay[..., None] + value)


def _initial_state(
    group: int,
    block_rows: int,
    kv_heads: int,
    per_kv: int,
    pools: tuple[jax.Array, jax.Array],
    sinks: jax.Array | None,
) -> _Softmax:
    """Nothing seen yet; a sink counts once per head in the denominator and has no value."""
    shape = (group, kv_heads, block_rows * per_kv)
    acc = jnp.zeros((*shape, pools[1].shape[2] // kv_heads), jnp.float32)
    if sinks is None:
        return _Softmax(jnp.full(shape, _NEG), jnp.zeros(shape, jnp.float32), acc)
    per_row = jnp.tile(sinks.reshape(kv_heads, per_kv), (1, block_rows)).astype(jnp.float32)
    return _Softmax(jnp.broadcast_to(per_row, shape), jnp.ones(shape, jnp.float32), acc)


def _rows_by_kv_head(x: jax.Array, kv_heads: int) -> jax.Array:
    """[GB, BQ, kvh * G, d] -> [GB, kvh, BQ * G, d]."""
    group, rows, heads, dim = x.shape
    per_kv = heads // kv_heads
    split = x.reshape(group, rows, kv_heads, per_kv, dim).swapaxes(1, 2)
    return split.reshape(group, kv_heads, rows * per_kv, dim)


def _rows_by_query_head(x: jax.Array, block_rows: int) -> jax.Array:
    """[GB, kvh, BQ * G, d] -> [GB, BQ, kvh * G, d]."""
    group, kv_heads, rows, dim = x.shape
    split = x.reshape(group, kv_heads, block_rows, rows // block_rows, dim).swapaxes(1, 2)
    return split.reshape(group, block_rows, -1, dim)
