"""The radix key of a request, packed once where the request keeps a token buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey, TokenBuffer


def build_radix_key(req: Any, length: int) -> RadixKey:
    """Key over the first ``length`` radix ids (prompt, then outputs) in the request's namespaces.

    A request may carry ``radix_tokens``, a :class:`TokenBuffer` it extends by the generated ids: then nothing is packed here.
    Otherwise the ids are ``radix_input_ids`` (else ``origin_input_ids``) + ``output_ids``, or ``fill_ids`` when those are
    too few. Raises ValueError when no source holds ``length`` ids.
    """
    extra_key = getattr(req, "extra_key", None)
    dp_rank = getattr(req, "dp_rank", None)
    packed = getattr(req, "radix_tokens", None)
    if isinstance(packed, TokenBuffer) and packed.length >= length:
        return packed.key(length, extra_key, dp_rank)
    ids = _ids(req, "radix_input_ids")
    if ids is None:
        ids = _ids(req, "origin_input_ids") or []
    outputs = _ids(req, "output_ids") or []
    if len(ids) + len(outputs) < length:
        ids, outputs = _ids(req, "fill_ids") or [], []
    if len(ids) + len(outputs) < length:
        raise ValueError(
            f"request {getattr(req, 'rid', '?')}: {length} tokens are to be cached, but only "
            f"{len(ids) + len(outputs)} token ids are known"
        )
    head = ids[:length]
    return RadixKey(
        head if len(head) == length else [*head, *outputs[: length - len(head)]], extra_key, dp_rank
    )


def _ids(req: Any, name: str) -> Sequence[int] | None:
    """A field that holds ids; None when the request has no such field, or a mock in its place."""
    value = getattr(req, name, None)
    if isinstance(value, np.ndarray):
        return value.tolist()  # type: ignore[no-any-return]
    return value if isinstance(value, Sequence) else None


def to_bigram_key(key: RadixKey) -> RadixKey:
    """EAGLE's key: position ``i`` holds ids ``i`` and ``i + 1``; one position shorter."""
    ids = np.asarray(key.token_ids, np.int32)
    pairs = list(zip(ids[:-1].tolist(), ids[1:].tolist()))
    return RadixKey(pairs, key.extra_key, key.dp_rank)
