"""Preconditions of moving SWA ownership between FULL slots (healing under a lock, rule 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_jax.srt.mem_cache.allocator.mapping import RankMapping
from sgl_jax.srt.mem_cache.allocator.named_pages import LiveTokens, named_pages
from sgl_jax.srt.mem_cache.allocator.rank_pool import IntArray

_SHOWN = 16


@dataclass(frozen=True, slots=True)
class TransferView:
    """What the checks read: the rank's mapping, the live tokens of a page, the first slot beyond the pool."""

    mapping: RankMapping
    live_tokens: LiveTokens
    limit: int


def check_transfer(source: IntArray, target: IntArray, view: TransferView) -> IntArray:
    """Validate a transfer and return the distinct source units (slots at page size 1, else pages).

    Raises ValueError that names ``dp_rank`` and the first offending slots.
    """
    mapping, page_size = view.mapping, view.mapping.page_size
    where = f"dp_rank={mapping.rank}: SWA transfer"
    if source.shape != target.shape:
        raise ValueError(f"{where} needs as many targets as sources, got {source.size} and {target.size}")
    if source.size == 0:
        return source
    for name, slots in (("source", source), ("target", target)):
        _refuse(f"{where}: {name} slots outside the pool", slots[(slots < page_size) | (slots >= view.limit)])
        ordered = np.sort(slots)
        _refuse(f"{where}: {name} slots named twice", ordered[1:][ordered[1:] == ordered[:-1]])
    _refuse(f"{where}: source slots are unmapped", source[mapping.read(source) == 0])
    _refuse(f"{where}: target slots are already mapped", target[mapping.read(target) != 0])
    if page_size == 1:
        return source
    _refuse(f"{where}: source and target differ in page offset", source[(source - target) % page_size != 0])
    pages, partial = named_pages(source, page_size, view.live_tokens)
    _refuse(f"{where}: source pages are named only in part", partial)
    pairs = np.unique(np.stack((source // page_size, target // page_size), axis=1), axis=0)
    for name, side in (("source", pairs[:, 0]), ("target", pairs[:, 1])):
        ordered = np.sort(side)
        _refuse(f"{where}: {name} pages would be torn apart", ordered[1:][ordered[1:] == ordered[:-1]])
    mapped = mapping.mapped_rows(pairs[:, 1]).any(axis=1)
    _refuse(f"{where}: target pages are partly mapped", pairs[mapped, 1])
    # A page that got SWA for only some of its tokens would pass for a shorter one.
    _refuse(
        f"{where}: target pages are named only in part",
        named_pages(target, page_size, view.live_tokens).partial,
    )
    return pages


def _refuse(message: str, offending: IntArray) -> None:
    if offending.size:
        raise ValueError(f"{message}: {offending[:_SHOWN].tolist()}")
