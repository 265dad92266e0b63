"""Request rows: which slot holds which token of a running request. Host only."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
RowIndex = Any  # (row, slice or index array)


class RowHolder(Protocol):
    """What a request needs in order to hold a row."""

    req_pool_idx: int | None


class ReqToTokenPool:
    """``req_to_token[row, position]`` = FULL slot; int32 ``[size, max_context_len]``. Row 0 is usable.

    Rows are shared by all DP ranks; the slots in a row are local to the request's rank.
    """

    def __init__(self, size: int, max_context_len: int, dtype: npt.DTypeLike = np.int32) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.req_to_token: IntArray = np.zeros((size, max_context_len), dtype=dtype)
        self.free_slots: list[int] = list(range(size))
        self.cache_loc_host_buf: IntArray | None = None

    def write(self, indices: RowIndex, values: Any) -> None:
        """``indices``: (row, slice or positions)."""
        self.req_to_token[indices] = values

    def read(self, req_pool_idx: int, length: int) -> IntArray:
        """Copy of the first ``length`` slots of a row."""
        return self.req_to_token[req_pool_idx, :length].copy()

    def available_size(self) -> int:
        """Free rows."""
        return len(self.free_slots)

    def alloc(self, reqs: list[Any]) -> list[int] | None:
        """Give every request a row and set ``req.req_pool_idx``; None and no change when rows are short.

        At most one request may hold a row already: the chunked one, which keeps it. Raises AssertionError when there
        are more, or when the holder is neither chunked nor has committed tokens.
        """
        holders = [req for req in reqs if req.req_pool_idx is not None]
        if len(holders) > 1:
            raise AssertionError(f"only one chunked request may keep its row, got {len(holders)}")
        for req in holders:
            if not (req.is_chunked > 0 or req.kv_committed_len > 0):
                raise AssertionError(
                    f"request in row {req.req_pool_idx} is not chunked and has no committed tokens"
                )
        need = len(reqs) - len(holders)
        if need > len(self.free_slots):
            return None
        rows = iter(self.free_slots[:need])
        del self.free_slots[:need]
        for req in reqs:
            if req.req_pool_idx is None:
                req.req_pool_idx = next(rows)
        return [req.req_pool_idx for req in reqs]

    def free(self, req: RowHolder) -> None:
        """Take the row back. Raises AssertionError when the request holds none."""
        if req.req_pool_idx is None:
            raise AssertionError("the request holds no row; a row is freed once")
        self.free_slots.append(req.req_pool_idx)
        req.req_pool_idx = None

    def clear(self) -> None:
        """All rows free; the slots in them are not erased."""
        self.free_slots = list(range(self.size))

    def init_cache_loc_host_buffer(self, length: int) -> IntArray:
        """A reusable int32 buffer of at least ``length``; it only grows."""
        if self.cache_loc_host_buf is None or self.cache_loc_host_buf.size < length:
            self.cache_loc_host_buf = np.zeros((length,), np.int32)
        return self.cache_loc_host_buf

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        aux = (self.size, self.max_context_len, tuple(self.free_slots))
        return (self.req_to_token,), aux

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: tuple[Any, ...]) -> ReqToTokenPool:
        pool = cls.__new__(cls)
        pool.size, pool.max_context_len, free_slots = aux
        pool.free_slots = list(free_slots)
        (pool.req_to_token,) = children
        pool.cache_loc_host_buf = None
        return pool
