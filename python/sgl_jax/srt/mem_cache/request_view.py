"""What a cache may know about a request: a small protocol, so that ``mem_cache`` never imports ``managers``."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_jax.srt.mem_cache.base_prefix_cache import DecLockRefParams

IntArray = npt.NDArray[np.int32]


class RequestView(Protocol):
    """Fields a cache reads or writes on a request. Test fakes may lack some: read them with ``getattr``.

    Positions are token offsets in the request's row; intervals are half-open::

        [0, cache_protected_len)                       tree-owned
        [cache_protected_len, kv_allocated_len)        request-owned FULL
        [max(cursor, protected), kv_allocated_len)     request-owned SWA, cursor = swa_evicted_seqlen
    """

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]
    fill_ids: list[int]
    extra_key: str | None
    dp_rank: int | None
    req_pool_idx: int | None
    prefix_indices: IntArray
    last_node: Any
    cache_protected_len: int
    last_matched_prefix_len: int
    kv_committed_len: int
    kv_allocated_len: int
    swa_evicted_seqlen: int
    swa_uuid_for_lock: int | None
    cache_lock_params: DecLockRefParams | None

    def pop_committed_kv_cache(self) -> int: ...
