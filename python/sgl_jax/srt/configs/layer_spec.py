"""What one layer kind of a decoder looks like: pure values shared by configuration, pools, layers and sizing.

A model is a tuple of :class:`LayerKind` (its *layer pattern*) plus one :class:`AttentionSpec` per kind that occurs in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class LayerKind(Enum):
    """Attention kind of a decoder layer: sees everything, or the last ``W`` keys (mem_cache.window)."""

    FULL = "full"
    SWA = "swa"


class RopeType(Enum):
    """Spelling of ``rope_type`` in config.json."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one layer kind.

    ``partial_factor``: share of the head that rotates. DEFAULT rotates the first ``int(factor * head_dim)`` dims;
    PROPORTIONAL (Gemma 4) keeps the pairing of the whole head and zeroes the other angles. ``factor`` divides frequencies
    (LINEAR, LLAMA3); ``low_freq_factor``, ``high_freq_factor``, ``original_context`` are LLAMA3's band edges.
    """

    theta: float
    type: RopeType = RopeType.DEFAULT
    partial_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer kind, before any tensor-parallel split.

    ``scale`` multiplies the scores. ``window`` is the number of keys a query sees, itself included; None for FULL.
    ``k_eq_v``: the value projection is the key projection (no ``v_proj`` tensor); K and V caches still hold different values.
    ``soft_cap``: ``cap * tanh(score / cap)`` on the scores, None = off.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rope: RopeSpec
    scale: float
    window: int | None = None
    k_eq_v: bool = False
    soft_cap: float | None = None

    def kv_heads_stored(self, tensor_size: int) -> int:
        """KV heads the pools hold over the whole tensor axis: replicated up to the axis size when fewer (DECISIONS 11).

        Raises ValueError when heads and axis do not divide one another.
        """
        if self.num_kv_heads % tensor_size == 0:
            return self.num_kv_heads
        if tensor_size % self.num_kv_heads == 0:
            return tensor_size
        raise ValueError(
            f"{self.num_kv_heads} KV heads cannot be split over or replicated to a tensor axis of {tensor_size}: "
            f"choose a --tp-size / --dp-size ratio that divides, or is a multiple of, {self.num_kv_heads}"
        )

    def kv_bytes_per_token(self, tensor_size: int, itemsize: int) -> int:
        """Bytes one token of one layer takes over the whole tensor axis, K and V, replicas counted."""
        return self.kv_heads_stored(tensor_size) * (self.head_dim + self.v_head_dim) * itemsize
