"""The simulated scheduler's steps over the real cache, each mirrored in the oracle: admission, chunks, decode, release.

The oracle predicts everything except two free choices of the implementation: which fresh slots an allocation returns and which
unlocked nodes an eviction takes. Those are observed and judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sgl_jax.srt.mem_cache.common import (
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    evict_from_tree_cache,
    release_kv_cache,
)
from sgl_jax.srt.mem_cache.page import floor_page, new_pages
from sgl_jax.srt.mem_cache.radix_tree.key import RadixKey
from sgl_jax.test.oracle.device import PoisonedDevice, extend_tags
from sgl_jax.test.oracle.observe import NodeView, mapping_of, walk
from sgl_jax.test.oracle.pool import DualOracle
from sgl_jax.test.oracle.tree import Cell, Receipt, TreeOracle
from sgl_jax.test.stateful.build import WorldConfig, build_allocator, build_cache, build_plain_allocator
from sgl_jax.test.stateful.prompts import make_prompt, next_token
from sgl_jax.test.stateful.sim_request import Shadow, SimReq
from sgl_jax.test.stateful.verify import absorb_evictions, need, pair_nodes

_CONTEXT_SLACK = 64
_FULL, _SWA = 0, 1


class Desk:
    """One cache, one oracle, a few live requests."""

    def __init__(self, cfg: WorldConfig) -> None:
        self.cfg = cfg
        context = cfg.full_pages * cfg.page + _CONTEXT_SLACK
        if self.dual:
            self.allocator = build_allocator(cfg.page, cfg.full_pages, cfg.swa_pages, cfg.dp)
        else:
            self.allocator = build_plain_allocator(cfg.page, cfg.full_pages, cfg.dp)
        self.cache = build_cache(cfg.cache, self.allocator, cfg.page, cfg.window, cfg.rows, context)
        self.req_pool = self.cache.req_to_token_pool
        swa_pages = cfg.swa_pages if self.dual else cfg.full_pages  # a plain pool: its mirror image
        self.pools = [DualOracle(r, cfg.full_pages, swa_pages, cfg.page) for r in range(cfg.dp)]
        self.tree = TreeOracle(cfg.page, cfg.window, self.pools)
        self.device = PoisonedDevice(self.pools)
        self.live: list[Shadow] = []
        self.waiting: list[SimReq] = []
        self.external: list[tuple[int, Any, Any, Receipt]] = []
        self.in_group = False
        self.steps = 0  # operations that did something
        self.serial = 0
        self.counts: dict[str, int] = {}

    def row(self, req: SimReq) -> np.ndarray:  # type: ignore[type-arg]
        return self.req_pool.req_to_token[req.req_pool_idx]

    def pick(self, which: int, test: Callable[[Shadow], bool]) -> Shadow | None:
        found = [s for s in self.live if test(s)]
        return found[which % len(found)] if found else None

    @property
    def unified(self) -> bool:
        """Whether the cache has a tree."""
        return self.cfg.cache != "chunk"

    @property
    def dual(self) -> bool:
        """Whether there is an SWA pool; without one the oracle's SWA half mirrors the FULL half slot by slot."""
        return self.cfg.cache != "full"

    def mapping(self, rank: int) -> np.ndarray:  # type: ignore[type-arg]
        """FULL slot -> SWA slot of one rank, as the implementation has it."""
        if self.dual:
            return np.asarray(mapping_of(self.allocator, rank, self.cfg.dp))
        return np.arange((self.cfg.full_pages + 1) * self.cfg.page, dtype=np.int32)

    def _window_cells(self, node: Any) -> tuple[Cell | None, list[Cell], list[int], bool]:
        """End cell, live cells a lock must protect (whole nodes until W live tokens), skipped ids, window covered."""
        pairs = {view.node.id: (view, cells) for _r, view, cells in pair_nodes(self, walk(self.cache))}
        if node is self.cache.root_node or node is None:
            return None, [], [], False
        view: NodeView | None = pairs[node.id][0]
        end = pairs[node.id][1][-1]
        if not self.dual:
            return end, [], [], False
        taken: list[Cell] = []
        skipped: list[int] = []
        live = 0
        while view is not None and live < self.cfg.window:
            cells = pairs[view.node.id][1]
            if view.swa is None:
                skipped.append(view.node.id)
            else:
                taken += cells  # type: ignore[arg-type]
                live += len(view.tokens)
            view = view.parent
        return end, taken, skipped, live >= self.cfg.window

    def _lock(self, rank: int, node: Any) -> tuple[Any, Receipt]:
        """Lock ``node`` for real and in the oracle; compare what the result shows."""
        if not self.unified:
            return self.cache.inc_lock_ref(node), Receipt([], [])
        result = self.cache.inc_lock_ref(node)
        end, cells, skipped, covered = self._window_cells(node)
        receipt, moved = self.tree.lock(end, cells)
        need(result.delta == -moved, f"[dp={rank}] lock delta {result.delta}, oracle {-moved}")
        need(
            (result.swa_uuid_for_lock is not None) == covered,
            f"[dp={rank}] lock boundary id present: window covered {covered}",
        )
        got = list(result.skip_lock_node_ids.get(_SWA, []))
        need(got == skipped, f"[dp={rank}] lock skipped {got}, oracle {skipped}")
        return result, receipt

    def _relock(self, shadow: Shadow) -> None:
        """The implementation exchanged the request's lock inside a call: mirror it on the new node."""
        req = shadow.req
        old = shadow.receipt
        end, cells, _skipped, covered = self._window_cells(req.last_node)
        shadow.receipt, _moved = self.tree.lock(end, cells)
        need(
            (req.swa_uuid_for_lock is not None) == covered, f"{req.rid} uuid mirror: window covered {covered}"
        )
        need(req.cache_lock_params is not None, f"{req.rid} has no receipt after caching")
        need(
            req.cache_lock_params.swa_uuid_for_lock == req.swa_uuid_for_lock,
            f"{req.rid} uuid mirror differs from the receipt",
        )
        if old is not None:
            self.tree.unlock(req.dp_rank or 0, old)

    def _match(self, rank: int, extra: str | None, tokens: list[int]) -> Any:
        """Match for real, compare length and slots with the oracle."""
        result = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra, rank)))
        want = [s for c in self.tree.match(rank, extra, tokens) for s in c.full] if self.unified else []
        got = np.asarray(result.device_indices)
        need(got.dtype == np.int32, f"match returns {got.dtype}")
        need(
            got.tolist() == want,
            f"[dp={rank}] match of {len(tokens)} tokens gives {len(got)}, oracle {len(want)}",
        )
        self.tree.touch(self.tree.common(rank, extra, tokens))
        return result

    def _start(self, req: SimReq) -> Shadow:
        """Match, lock, row: what admission does before it allocates."""
        rank = req.dp_rank or 0
        tokens = req.tokens()
        result = self._match(rank, req.extra_key, tokens[:-1])
        shadow = Shadow(req)
        extend_tags(shadow.tags, tokens)
        req.prefix_indices = np.asarray(result.device_indices).copy()
        req.last_node = result.last_device_node
        req.last_host_node = result.last_host_node
        req.cache_protected_len = req.last_matched_prefix_len = len(req.prefix_indices)
        locked, shadow.receipt = self._lock(rank, req.last_node)
        req.cache_lock_params = locked.to_dec_params()
        req.swa_uuid_for_lock = locked.swa_uuid_for_lock
        shadow.protected = len(req.prefix_indices)
        assert self.req_pool.alloc([req]) is not None
        req.is_chunked = 1
        shadow.row = req.prefix_indices.tolist()
        self.row(req)[: len(shadow.row)] = shadow.row
        self.live.append(shadow)
        return shadow

    def _back_out(self, shadow: Shadow) -> None:
        """Admission failed before anything was computed."""
        req = shadow.req
        self.cache.dec_lock_ref(req.last_node, req.cache_lock_params)
        if self.unified:
            assert shadow.receipt is not None
            self.tree.unlock(req.dp_rank or 0, shadow.receipt)
        req.cache_lock_params = None
        req.swa_uuid_for_lock = None
        self.req_pool.free(req)
        self.live.remove(shadow)

    def _budget(self, rank: int) -> tuple[int, int]:
        """What each pool could give if everything evictable were evicted."""
        sums = self.tree.sums(rank)
        pool = self.pools[rank]
        return pool.full.available() + sums["full_evictable"], pool.swa.available() + sums["swa_evictable"]

    def _extend(self, shadows: list[Shadow], ends: list[int]) -> bool:
        """One prefill batch on one rank. False when memory ran out (which is then proved to be honest)."""
        cfg = self.cfg
        rank = shadows[0].req.dp_rank or 0
        starts = [len(s.row) for s in shadows]
        total = sum(ends) - sum(starts)
        demand = sum(new_pages(a, b, cfg.page) for a, b in zip(starts, ends)) * cfg.page
        budget = self._budget(rank)
        try:
            if cfg.page == 1:
                out = alloc_token_slots(self.cache, total, dp_rank=rank)
            else:
                lasts = np.array([s.row[-1] if s.row else -1 for s in shadows], np.int32)
                out = alloc_paged_token_slots_extend(self.cache, starts, ends, lasts, total, dp_rank=rank)
        except RuntimeError as error:
            need("ut of memory" in str(error), f"[dp={rank}] allocation raised {error!r}")
            self._absorb()
            self.tree.events["out_of_memory"] += 1
            need(
                min(budget) < demand,
                f"[dp={rank}] out of memory with {budget} (full, swa) attainable for {demand}",
            )
            return False
        self._absorb()
        out = np.asarray(out)
        need(
            out.dtype == np.int32 and len(out) == total,
            f"[dp={rank}] allocation returned {len(out)} x {out.dtype}",
        )
        for shadow, start, end in zip(shadows, starts, ends):
            self._grow(shadow, out[: end - start], end)
            out = out[end - start :]
            self._launch(shadow, start, end)
            shadow.committed = False
            shadow.req.fill_ids = shadow.req.tokens()[:end]
            shadow.req.extend_batch_idx += 1
            if end == shadow.req.seqlen:
                shadow.prefilling = False
                self._sample(shadow, shadow.req.extend_batch_idx + end)
        return True

    def _absorb(self) -> None:
        if self.unified:
            absorb_evictions(self)

    def _grow(self, shadow: Shadow, slots: np.ndarray, end: int) -> None:  # type: ignore[type-arg]
        """New slots become the request's: pools, row, counters."""
        req, cfg = shadow.req, self.cfg
        rank = req.dp_rank or 0
        full = slots.tolist()
        swa = self.mapping(rank)[slots].tolist()
        self.pools[rank].take_pair(full, swa, shadow.owner, shadow.row[-1] if shadow.row else None)
        position = len(shadow.row)
        need(
            full[0] % cfg.page == position % cfg.page,
            f"{req.rid} slot {full[0]} for position {position} breaks page alignment",
        )
        self.row(req)[position:end] = full
        shadow.row += full
        req.kv_committed_len = req.kv_allocated_len = end

    def _launch(self, shadow: Shadow, start: int, end: int) -> None:
        req = shadow.req
        rank = req.dp_rank or 0
        mapping = self.mapping(rank)
        self.device.launch(rank, self.row(req), mapping, shadow.tags, start, end, self.cfg.window)

    def _sample(self, shadow: Shadow, draw: int) -> None:
        req = shadow.req
        req.output_ids.append(next_token(self.cfg.page, req.seqlen, draw))
        extend_tags(shadow.tags, req.output_ids[-1:])

    def _chunk_end(self, shadow: Shadow, chunk: int) -> int:
        return min(shadow.req.seqlen, len(shadow.row) + chunk)

    def _new_req(self, a: int, b: int, c: int) -> SimReq:
        cfg = self.cfg
        rank = a % cfg.dp
        extra = "x" if (a // cfg.dp) % 8 == 7 else None
        return SimReq(f"r{self.serial}", make_prompt(cfg.page, cfg.blocks, b, c), rank, extra)

    def _admit(self, req: SimReq, copies: int, chunk: int) -> bool:
        """Admit ``copies`` requests with the same tokens in one batch (D35)."""
        shadows = [self._start(req)]
        for i in range(1, copies):
            shadows.append(
                self._start(
                    SimReq(
                        f"{req.rid}.{i}",
                        list(req.origin_input_ids),
                        req.dp_rank,
                        req.extra_key,
                        list(req.output_ids),
                    )
                )
            )
        if not self._extend(shadows, [self._chunk_end(s, chunk) for s in shadows]):
            for shadow in reversed(shadows):
                self._back_out(shadow)
        return True

    def _reclaim(self, shadow: Shadow, pre_len: int) -> None:
        """``evict_req_swa``: exactly the formula of RFC 5, exactly the request's own slots."""
        req, cfg = shadow.req, self.cfg
        rank = req.dp_rank or 0
        self.cache.evict_req_swa(req, pre_len, dp_rank=rank)
        if not self.dual:
            return
        old = max(shadow.cursor, shadow.protected)
        wanted = max(old, pre_len - cfg.window - cfg.page)
        new = wanted - wanted % cfg.page
        self.pools[rank].release_swa(shadow.row[old:new])
        shadow.cursor = new
        need(
            req.swa_evicted_seqlen == shadow.cursor,
            f"{req.rid} cursor {req.swa_evicted_seqlen}, oracle {shadow.cursor}",
        )

    def _decode_once(self, rank: int, draw: int) -> bool:
        batch = [s for s in self.live if (s.req.dp_rank or 0) == rank and s.committed and not s.prefilling]
        batch = [s for s in batch if len(s.row) + 1 < self.req_pool.req_to_token.shape[1]]
        while batch:
            for shadow in batch:
                if draw % 3:
                    self._reclaim(shadow, len(shadow.row) - draw % 2)
            out = self._alloc_decode(rank, batch)
            if out is not None:
                break
            self._retract(batch.pop())
        for i, shadow in enumerate(batch):
            start = len(shadow.row)
            self._grow(shadow, out[i : i + 1], start + 1)  # type: ignore[index]
            self._launch(shadow, start, start + 1)
            shadow.req.decode_batch_idx += 1
            self._sample(shadow, draw + start)
        return bool(batch)

    def _alloc_decode(self, rank: int, batch: list[Shadow]) -> np.ndarray | None:  # type: ignore[type-arg]
        cfg = self.cfg
        crossing = sum(1 for s in batch if len(s.row) % cfg.page == 0) * cfg.page
        budget = self._budget(rank)
        out: Any = None
        if cfg.page == 1:
            try:
                out = alloc_token_slots(self.cache, len(batch), dp_rank=rank)
            except RuntimeError as error:
                need("ut of memory" in str(error), f"[dp={rank}] decode raised {error!r}")
        else:
            if crossing:
                evict_from_tree_cache(self.cache, crossing, dp_rank=rank)
            lens = [len(s.row) + 1 for s in batch]
            out = self.allocator.alloc_decode(
                lens, np.array([s.row[-1] for s in batch], np.int32), dp_rank=rank
            )
        self._absorb()
        if out is None:
            self.tree.events["out_of_memory_decode"] += 1
            need(
                min(budget) < crossing,
                f"[dp={rank}] decode out of memory with {budget} attainable for {crossing} (D45)",
            )
        return out  # type: ignore[no-any-return]

    def _release(self, shadow: Shadow, is_insert: bool) -> None:
        """The one release path, with the oracle's version of it."""
        req = shadow.req
        rank, size = req.dp_rank or 0, self.cfg.page
        release_kv_cache(req, self.cache, is_insert=is_insert)
        need(req.req_pool_idx is None, f"{req.rid} kept its row")
        need(req.cache_lock_params is None and req.swa_uuid_for_lock is None, f"{req.rid} kept its receipt")
        length = len(shadow.row)
        if self.unified and is_insert:
            aligned = max(floor_page(length, size), shadow.protected)
            self.pools[rank].release_pair(shadow.row[aligned:])
            self.tree.insert(
                rank, req.extra_key, req.tokens()[:aligned], shadow.row, shadow.protected, shadow.cursor
            )
        else:
            self.pools[rank].release_pair(shadow.row[shadow.protected :])
        if self.unified:
            assert shadow.receipt is not None
            self.tree.unlock(rank, shadow.receipt)
        self.live.remove(shadow)

    def _retract(self, shadow: Shadow) -> None:
        self._release(shadow, is_insert=False)
        shadow.req.reset_for_retract()
        self.waiting.append(shadow.req)
