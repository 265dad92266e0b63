"""sglang-jax's name for the clean-up of an aborted prompt between its chunks (CONTRACT 11).

The scheduler here ends every request through ``lifecycle.Lifecycle.finish``; this class offers the same effect to objects built
the sglang-jax way: attributes ``tree_cache`` and per-rank ``chunked_reqs``, and ``running_batch.reqs_info`` where there is one.
"""

from __future__ import annotations

from typing import Any

from sgl_jax.srt.mem_cache.common import release_kv_cache


class SchedulerOutputProcessorMixin:
    """Needs ``tree_cache`` and ``chunked_reqs`` on the object."""

    tree_cache: Any
    chunked_reqs: list[Any]

    def _finalize_chunked_abort(self, req: Any, dp_rank: int, *, allow_overallocated: bool = True) -> None:
        """Release the request without inserting it and clear it from both owner lists. Idempotent (D30, D36)."""
        release_kv_cache(req, self.tree_cache, is_insert=False, allow_overallocated=allow_overallocated)
        if self.chunked_reqs[dp_rank] is req:
            self.chunked_reqs[dp_rank] = None
        batch = getattr(self, "running_batch", None)
        infos = getattr(batch, "reqs_info", None)
        if infos is not None and infos[dp_rank].chunked_req is req:
            infos[dp_rank].chunked_req = None
