"""What one forward pass takes: device (or host) arrays with the rank axis in front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from sgl_jax.srt.layers.attention.metadata import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One padded step. All int32; ``T`` tokens, ``R`` logit rows per rank.

    ``logits_rows``: rank-local token indices whose logits are wanted (last token per sequence; every token for prompt logprobs).
    Padding tokens have id 0, position 0, slot 0; padding rows repeat any index.
    """

    input_ids: Any  # [dp, T]
    positions: Any  # [dp, T]
    logits_rows: Any  # [dp, R]
    attention: AttentionMetadata
