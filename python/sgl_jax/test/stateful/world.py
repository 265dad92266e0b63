"""A simulated scheduler over the real cache, mirrored call by call in the oracle.

Every public ``op_*`` takes small integers (so hypothesis and the soak drive the same code) and returns True when it did
something. The oracle predicts everything except two free choices of the implementation: which fresh slots an allocation
returns and which unlocked nodes an eviction takes. Those are observed and judged.
"""

from __future__ import annotations

import numpy as np

from sgl_jax.srt.mem_cache.base_prefix_cache import EvictParams
from sgl_jax.srt.mem_cache.page import floor_page
from sgl_jax.test.oracle.observe import walk
from sgl_jax.test.oracle.pool import Mismatch
from sgl_jax.test.stateful.desk import Desk
from sgl_jax.test.stateful.sim_request import Shadow
from sgl_jax.test.stateful.verify import absorb_evictions, judge_eviction, need, pair_nodes, verify


class World(Desk):
    """Operations of the simulated scheduler; every one is followed by a comparison."""

    def step(self, name: str, a: int, b: int, c: int, full_check: bool = True) -> bool:
        """Run ``op_<name>`` and compare everything afterwards."""
        did: bool = getattr(self, f"op_{name}")(a, b, c)
        self.serial += 1
        if did:
            self.steps += 1
            self.counts[name] = self.counts.get(name, 0) + 1
            verify(self, full_check)
        return did

    def op_admit(self, a: int, b: int, c: int) -> bool:
        if len(self.live) >= self.cfg.rows:
            return False
        return self._admit(self._new_req(a, b, c), 1, self.cfg.chunk * self.cfg.page)

    def op_admit_twins(self, a: int, b: int, c: int) -> bool:
        if len(self.live) + 1 >= self.cfg.rows:
            return False
        return self._admit(self._new_req(a, b, c), 2, self.cfg.chunk * self.cfg.page)

    def op_readmit(self, a: int, b: int, c: int) -> bool:
        """A retracted request comes back."""
        if not self.waiting or len(self.live) >= self.cfg.rows:
            return False
        req = self.waiting.pop(a % len(self.waiting))
        return self._admit(req, 1, self.cfg.chunk * self.cfg.page)

    def op_commit(self, a: int, b: int, c: int) -> bool:
        """``cache_unfinished_req`` after a chunk or after the last prefill batch."""
        shadow = self.pick(a, lambda s: not s.committed)
        if shadow is None:
            return False
        req = shadow.req
        self.cache.cache_unfinished_req(req)
        shadow.committed = True
        fill = len(req.fill_ids)
        if self.unified:
            aligned = floor_page(fill, self.cfg.page)
            args = (
                req.dp_rank or 0,
                req.extra_key,
                req.fill_ids[:aligned],
                shadow.row,
                shadow.protected,
                shadow.cursor,
            )
            self.tree.insert(*args)
            need(
                req.cache_protected_len == aligned,
                f"{req.rid} protected {req.cache_protected_len} after inserting {aligned}",
            )
            need(
                req.last_matched_prefix_len == aligned,
                f"{req.rid} matched {req.last_matched_prefix_len}, accepted {aligned}",
            )
            shadow.protected = aligned
            self._relock(shadow)
        got = np.asarray(req.prefix_indices).tolist()
        need(got == shadow.row[:fill], f"{req.rid} prefix_indices {got[:8]}, oracle {shadow.row[:8]}")
        return True

    def op_next_chunk(self, a: int, b: int, c: int) -> bool:
        """Prefill goes on; memory trouble aborts the request or leaves it parked."""
        shadow = self.pick(a, lambda s: s.committed and s.prefilling)
        if shadow is None:
            return False
        if b % 2:
            self._reclaim(shadow, len(shadow.row))
        chunk = max(1, (self.cfg.chunk * self.cfg.page) // (1 + c % 3))
        if c % 4 == 3:
            chunk = max(1, chunk - 1)
        if not self._extend([shadow], [self._chunk_end(shadow, chunk)]) and b % 3 == 0:
            self._release(shadow, is_insert=False)
        return True

    def op_reclaim(self, a: int, b: int, c: int) -> bool:
        """At any time with any processed length: the boundary must never move back nor run ahead."""
        shadow = self.pick(a, lambda s: len(s.row) > 0)
        if shadow is None:
            return False
        length = len(shadow.row)
        self._reclaim(shadow, length - b % (length + 1) if b % 3 == 0 else length)
        return True

    def op_decode(self, a: int, b: int, c: int) -> bool:
        """One decode batch of one rank, ``1 + c % 4`` steps; the last request is retracted when memory runs out."""
        did = False
        for _ in range(1 + c % 4):
            did = self._decode_once(a % self.cfg.dp, b) or did
        return did

    def op_finish(self, a: int, b: int, c: int) -> bool:
        shadow = self.pick(a, lambda s: not s.prefilling)
        if shadow is None:
            return False
        self._release(shadow, is_insert=True)
        return True

    def op_abort(self, a: int, b: int, c: int) -> bool:
        """At every point: mid-prefill, uncommitted, decoding."""
        shadow = self.pick(a, lambda s: True)
        if shadow is None:
            return False
        self._release(shadow, is_insert=False)
        return True

    def op_retract(self, a: int, b: int, c: int) -> bool:
        shadow = self.pick(a, lambda s: True)
        if shadow is None:
            return False
        self._retract(shadow)
        return True

    def op_give_up(self, a: int, b: int, c: int) -> bool:
        """A waiting request is aborted: it holds nothing."""
        if not self.waiting:
            return False
        self.waiting.pop(a % len(self.waiting))
        return True

    def op_group(self, a: int, b: int, c: int) -> bool:
        """Several results processed inside one free group: nothing is allocatable before the end."""
        if not self.live:
            return False
        self.allocator.free_group_begin()
        for pool in self.pools:
            pool.group_begin()
        self.in_group = True
        for i in range(1 + b % 3):
            shadow = self.pick(a + i, lambda s: not s.prefilling or c % 2 == 0)
            if shadow is not None:
                if c % 3 == 0 and not shadow.committed:
                    self.op_commit(self._index_uncommitted(shadow), 0, 0)
                self._release(shadow, is_insert=not shadow.prefilling and c % 4 != 1)
            if c % 5 == 0:
                self.op_evict(a, b, c)
            verify(self, False)
        self.allocator.free_group_end()
        for pool in self.pools:
            pool.group_end()
        self.in_group = False
        return True

    def _index_uncommitted(self, shadow: Shadow) -> int:
        return [s for s in self.live if not s.committed].index(shadow)

    def op_match(self, a: int, b: int, c: int) -> bool:
        req = self._new_req(a, b, c)
        self._match(req.dp_rank or 0, req.extra_key, req.tokens())
        return self.unified

    def op_evict(self, a: int, b: int, c: int) -> bool:
        """Evict per pool; the result must equal what vanished, and be enough or everything."""
        if not self.unified:
            return False
        rank = a % self.cfg.dp
        scale = max(1, self.cfg.page // 2)
        full, swa = (b % 9) * scale, (c % 9) * scale if self.dual else 0
        result = self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=swa, dp_rank=rank))
        gone = absorb_evictions(self)
        got = [result.num_tokens_evicted, result.swa_num_tokens_evicted]
        if not self.dual:
            got[1] = got[0]
        need(got == gone.freed[rank], f"[dp={rank}] evict reports {got}, vanished {gone.freed[rank]}")
        need(full + swa > 0 or got == [0, 0], f"[dp={rank}] evict of nothing freed {got}")
        judge_eviction(self, rank, (full, swa), gone)
        return True

    def op_lock(self, a: int, b: int, c: int) -> bool:
        """Somebody locks any node and keeps the receipt."""
        if not self.unified or len(self.external) >= 6:
            return False
        pairs = pair_nodes(self, walk(self.cache))
        if not pairs:
            return False
        rank, view, _cells = pairs[a % len(pairs)]
        result, receipt = self._lock(rank, view.node)
        self.external.append((rank, view.node, result.to_dec_params(), receipt))
        return True

    def op_unlock(self, a: int, b: int, c: int) -> bool:
        """In any order."""
        if not self.external:
            return False
        rank, node, params, receipt = self.external.pop(a % len(self.external))
        self.cache.dec_lock_ref(node, params)
        self.tree.unlock(rank, receipt)
        return True

    def op_flush(self, a: int, b: int, c: int) -> bool:
        """Idle flush: tree, rows, allocator; capacity is cold again."""
        if self.live or self.external:
            return False
        if self.unified:
            self.cache.reset()
        self.req_pool.clear()
        self.allocator.clear()
        self.tree.clear()
        for pool in self.pools:
            pool.clear()
        return True

    def drain(self) -> None:
        """Release everything, evict everything: both pools must be cold (D06)."""
        while self.external:
            self.step("unlock", 0, 0, 0)
        while self.live:
            self.step("abort" if self.live[0].prefilling else "finish", 0, 0, 0)
        for rank in range(self.cfg.dp):
            big = self.cfg.full_pages * self.cfg.page
            if self.unified:
                self.cache.evict(EvictParams(num_tokens=big, swa_num_tokens=big, dp_rank=rank))
                absorb_evictions(self)
            pool = self.pools[rank]
            cold = (pool.full.pages * self.cfg.page, pool.swa.pages * self.cfg.page)
            if (pool.full.available(), pool.swa.available()) != cold:
                raise Mismatch(
                    f"[dp={rank}] drained pools {pool.full.available()}, {pool.swa.available()}, cold {cold}"
                )
        verify(self, True)
