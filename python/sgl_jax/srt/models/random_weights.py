"""Random weights that make a *useful* model: reproducible everywhere, non-degenerate when decoded greedily. Pure numpy.

Stream: ``Philox(key=[seed, crc32(name)])`` raw words, top 16 bits as a centred uniform of unit variance, rounded to bf16-representable
values, so that a BF16 file and a float32 run hold the same numbers. Used by ``--load-format dummy`` and by ``make-tiny-model``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

#: logits of a random model have this standard deviation
LOGIT_STD = 4.0
#: rms of the embedding as layer 0 sees it, for tied models
TIED_EMBEDDING_RMS = 0.1


def unit_noise(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of zero mean and unit variance that depend on ``seed`` and ``name`` only."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.Philox(key=[seed, zlib.crc32(name.encode())]).random_raw(count)
    centred = ((raw >> np.uint64(48)).astype(np.float64) - 32767.5) / 32768.0 * np.sqrt(3.0)
    noise: np.ndarray = centred.astype(np.float32).reshape(shape)
    return noise


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Float32 with values bf16 can hold."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """Scales of one family. ``q_norm``: mean of the query norm's effective weight, 1 unless sharper or softer attention is wanted.

    ``zero_centred``: norms are stored as ``w - 1``. ``tied``: output table = embedding, multiplied by ``sqrt(hidden)`` when looked up.
    """

    hidden: int
    tied: bool
    zero_centred: bool
    q_norm: float = 1.0

    @classmethod
    def for_family(cls, family: str, hidden: int, tied: bool) -> WeightRecipe:
        q_norm = {"gemma4": 0.5, "gemma3": 2.0, "qwen3": 2.0}.get(family, 1.0)
        return cls(hidden, tied, family == "gemma3", q_norm)

    def make(self, seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor ``name`` (HF name, ``model.`` prefix) as float32."""
        return round_to_bf16(self._scaled(name)(unit_noise(seed, name, shape)))

    def _scaled(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if leaf == "layer_scalar":
            return lambda z: 0.9 + 0.05 * z
        if "norm" in leaf:
            mean = self._norm_mean(name, leaf)
            return lambda z: mean * (1 + 0.1 * z) - (1.0 if self.zero_centred else 0.0)
        if leaf == "embed_tokens":
            scale = TIED_EMBEDDING_RMS / self.hidden**0.5 if self.tied else 1.0
            return lambda z: scale * z
        gain = LOGIT_STD if leaf == "lm_head" else 1.0
        return lambda z: gain * z / np.float32(z.shape[-1]) ** 0.5

    def _norm_mean(self, name: str, leaf: str) -> float:
        if leaf == "q_norm":
            return self.q_norm
        if name.endswith("model.norm.weight") and self.tied:
            # logits = norm(x) . embedding: std = mean * sqrt(hidden) * embedding std
            return LOGIT_STD / TIED_EMBEDDING_RMS
        return 1.0
