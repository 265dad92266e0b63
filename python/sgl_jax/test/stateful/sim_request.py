"""The simulated scheduler's request: the fields caches see, and what the oracle believes about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_jax.test.oracle.tree import Receipt


@dataclass(eq=False)
class SimReq:
    """Duck-typed request (``mem_cache/request_view.py``)."""

    rid: str
    origin_input_ids: list[int]
    dp_rank: int | None = 0
    extra_key: str | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    req_pool_idx: int | None = None
    prefix_indices: Any = field(default_factory=lambda: np.empty((0,), np.int32))
    last_node: Any = None
    last_host_node: Any = None
    host_hit_length: int = 0
    cache_protected_len: int = 0
    last_matched_prefix_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    kv_committed_freed: bool = False
    kv_overallocated_freed: bool = False
    swa_evicted_seqlen: int = 0
    swa_uuid_for_lock: int | None = None
    cache_lock_params: Any = None
    extend_batch_idx: int = 0
    decode_batch_idx: int = 0
    is_chunked: int = 0
    is_retracted: bool = False

    def tokens(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def pop_committed_kv_cache(self) -> int:
        """Committed length, to be released once."""
        if self.kv_committed_freed:
            return 0
        self.kv_committed_freed = True
        return self.kv_committed_len

    def pop_overallocated_kv_cache(self) -> tuple[int, int]:
        if self.kv_overallocated_freed:
            return self.kv_allocated_len, self.kv_allocated_len
        self.kv_overallocated_freed = True
        return self.kv_committed_len, self.kv_allocated_len

    def reset_for_retract(self) -> None:
        """Back to the waiting queue: keeps its tokens, nothing else."""
        assert self.cache_lock_params is None, "retracted while it still holds a receipt"
        self.__init__(self.rid, self.origin_input_ids, self.dp_rank, self.extra_key, self.output_ids)  # type: ignore[misc]
        self.is_retracted = True


@dataclass(eq=False)
class Shadow:
    """Oracle side of a live request. ``row``: FULL slot per position; ``committed``: what was computed went to the cache."""

    req: SimReq
    row: list[int] = field(default_factory=list)
    protected: int = 0
    cursor: int = 0
    receipt: Receipt | None = None
    committed: bool = True
    prefilling: bool = True
    tags: list[int] = field(default_factory=list)

    @property
    def owner(self) -> str:
        return self.req.rid
