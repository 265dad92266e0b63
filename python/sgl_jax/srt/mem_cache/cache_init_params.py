"""Validated construction parameters shared by every prefix cache (RFC-0035 section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CacheInitParams:
    """What a cache and its components are built from.

    ``req_to_token_pool`` and ``token_to_kv_pool_allocator`` are the shared pools (never copied), ``page_size`` is in
    tokens, ``sliding_window_size`` in keys including self (None for models without SWA).
    """

    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    page_size: int
    is_eagle: bool = False
    sliding_window_size: int | None = None
    enable_recurrent_extra_buffer: bool = False
    recurrent_track_interval: int | None = None
