"""Dense float32/float64 attention in numpy: what every paged path must equal. For tests and tools, never for serving."""

from __future__ import annotations

import numpy as np


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of the last ``Tq`` positions of one sequence.

    q [Tq, heads, dk], k [Tk, kv_heads, dk], v [Tk, kv_heads, dv] with ``Tq <= Tk``; the query of row ``i`` stands at position
    ``Tk - Tq + i`` and sees keys ``k <= q``, the last ``window`` of them (itself included). ``sinks`` [heads]: one extra logit
    per head. Returns [Tq, heads, dv].
    """
    queries, keys = q.shape[0], k.shape[0]
    per_kv = q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, per_kv, axis=1), np.repeat(v, per_kv, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, wide_k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position = np.arange(keys - queries, keys)[:, None]
    key = np.arange(keys)[None]
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, extra], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: np.ndarray = np.einsum("hqk,khd->qhd", weights[..., :keys], wide_v)
    return out
