"""What every cache does with a request's receipt, rank and last page, in one place."""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.mem_cache.base_prefix_cache import IncLockRefResult
from sgl_jax.srt.mem_cache.page import ceil_page


def store_receipt(req: Any, result: IncLockRefResult | None) -> None:
    """The complete release parameters live on the request; None clears them and their mirror."""
    req.cache_lock_params = None if result is None else result.to_dec_params()
    req.swa_uuid_for_lock = None if result is None else result.swa_uuid_for_lock


def committed_tail_end(req: Any, committed: int, page_size: int) -> int:
    """End of the slots that leave with the committed length: the rest of its last page goes along.

    ``[committed, kv_allocated_len)`` may hold slots of the same page (a step allocated, not committed); a page is released
    whole, so all of its tokens are named. Slots of later pages are the caller's over-allocated tail.
    """
    allocated = getattr(req, "kv_allocated_len", committed)
    return max(committed, min(ceil_page(committed, page_size), int(allocated)))


def rid_of(req: Any) -> str:
    """The request's id for messages and logs."""
    return str(getattr(req, "rid", ""))


def own_rank(req: Any) -> int:
    """The request's DP rank; None means 0."""
    rank = getattr(req, "dp_rank", None)
    return 0 if rank is None else int(rank)


def require_rank(req: Any, ranks: int) -> None:
    """Raises ValueError when there are several ranks and the request carries none: its slots would go to rank 0's pools."""
    if ranks > 1 and getattr(req, "dp_rank", None) is None:
        raise ValueError(
            f"request {rid_of(req)} has no dp_rank on {ranks} data-parallel ranks: slots are rank-local, set "
            f"req.dp_rank=0..{ranks - 1}"
        )


def reclaim_rank(req: Any, dp_rank: int | None, ranks: int) -> int:
    """The rank of an ``evict_req_swa`` call; omitted, it is 0 where there is one rank.

    Raises ValueError when it is omitted above that, or is not the request's: the other rank's window would leak.
    """
    if dp_rank is None:
        if ranks > 1:
            raise ValueError(
                f"evict_req_swa without dp_rank on {ranks} data-parallel ranks: pass req.dp_rank"
            )
        dp_rank = 0
    own = getattr(req, "dp_rank", None)
    if isinstance(own, int) and own != dp_rank:
        raise ValueError(
            f"evict_req_swa on dp_rank={dp_rank} for a request of dp_rank={own}: pass dp_rank={own}"
        )
    return dp_rank
