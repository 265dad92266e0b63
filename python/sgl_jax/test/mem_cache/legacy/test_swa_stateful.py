"""A seeded driver over all operations of the legacy hybrid cache, with a poisoned device under it.

Every slot of both pools carries the prefix it was computed for; freed slots are poisoned at once. After each step every live
row must read its own prefix in FULL and, over its last window, in SWA; so reuse too early or a wrong slot fails even when the
counters balance. Strict allocator; ledger, tree and allocator are checked after every step.
"""

import random

import numpy as np
import pytest

from sgl_jax.test.mem_cache.legacy.kit import Desk

STEPS = 250


class Driver:
    def __init__(self, seed: int, page: int, window: int, dp: int) -> None:
        self.rng = random.Random(seed)
        pages = 24 if page > 1 else 72
        self.desk = Desk(page, window, full=pages * page, swa=(pages - 6) * page, dp=dp, rows=4)
        size = (pages + 1) * page
        self.full = np.zeros((dp, size), np.int64)
        self.swa = np.zeros((dp, size), np.int64)
        self.unit = max(1, page // 2)

    def tags(self, tokens: list[int]) -> np.ndarray:  # type: ignore[type-arg]
        out, tag = [], 17
        for token in tokens:
            tag = hash((tag, token)) & 0x7FFFFFFFFFFF | 1
            out.append(tag)
        return np.array(out, np.int64)

    def prompt(self) -> list[int]:
        blocks = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 7))]
        tokens = [1 + b + i for b in blocks for i in range(0, 3 * self.unit, 1)]
        return tokens + [self.rng.randrange(50, 54) for _ in range(self.rng.randrange(1, 3))]

    def compute(self, req, start: int) -> None:
        rank, end = req.dp_rank, req.kv_committed_len
        slots = self.desk.row(req)[start:end]
        tags = self.tags(req.tokens()[:end])[start:]
        self.full[rank, slots] = tags
        self.swa[rank, self.desk.allocator.translate_full_to_swa(slots, dp_rank=rank)] = tags

    def poison(self) -> None:
        page = self.desk.page
        for rank in range(self.desk.dp):
            for store, sub in (
                (self.full, self.desk.allocator.full_attn_allocator),
                (self.swa, self.desk.allocator.swa_attn_allocator),
            ):
                if page == 1:
                    store[rank, np.asarray(sub.free_slots[rank])] = -1
                else:
                    free = np.concatenate([sub.free_pages[rank], sub.release_pages[rank]])
                    store[rank].reshape(-1, page)[free] = -1

    def read_all(self) -> None:
        for req in self.desk.live:
            end, rank = req.kv_committed_len, req.dp_rank
            row, tags = self.desk.row(req)[:end], self.tags(req.tokens()[:end])
            assert np.array_equal(self.full[rank, row], tags), f"{req.rid} reads foreign FULL slots"
            low = max(0, end - self.desk.window + 1)
            peers = self.desk.allocator.translate_full_to_swa(row[low:], dp_rank=rank)
            assert np.array_equal(self.swa[rank, peers], tags[low:]), f"{req.rid} reads foreign SWA slots"

    def room(self, tokens: int, rank: int) -> bool:
        cache, allocator, need = self.desk.cache, self.desk.allocator, tokens + 2 * self.desk.page
        full = allocator.full_available_size(rank) + cache.full_evictable_size(rank)
        return min(full, allocator.swa_available_size(rank) + cache.swa_evictable_size(rank)) >= need

    def admit(self) -> None:
        rank, tokens = self.rng.randrange(self.desk.dp), self.prompt()
        if self.desk.pool.available_size() == 0 or not self.room(len(tokens), rank):
            return
        before = len(self.desk.match(tokens[:-1], rank).device_indices)
        end = self.rng.randrange(before + 1, len(tokens) + 1)
        req = self.desk.admit(tokens, rank, end)
        assert req.cache_protected_len == before
        self.compute(req, before)

    def step(self) -> None:
        live = self.desk.live
        action = self.rng.choice(
            ["admit", "admit", "grow", "grow", "commit", "reclaim", "finish", "abort", "evict"]
        )
        if action == "admit" or not live:
            self.admit()
        elif action == "evict":
            amounts = [self.rng.randrange(0, 3 * self.desk.page) for _ in range(2)]
            self.desk.evict(*amounts, rank=self.rng.randrange(self.desk.dp))
        else:
            req = self.rng.choice(live)
            start = req.kv_committed_len
            if action == "grow" and self.room(self.unit, req.dp_rank):
                if start < len(req.origin_input_ids):
                    self.desk.extend(req, min(len(req.origin_input_ids), start + 2 * self.unit))
                else:
                    self.desk.decode(req, self.rng.randrange(60, 63))
                self.compute(req, start)
            elif action == "commit":
                self.desk.commit(req)
            elif action == "reclaim":
                self.desk.reclaim(req, start)
            elif action == "finish":
                self.desk.finish(req)
            elif action == "abort":
                self.desk.finish(req, is_insert=False)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.poison()
            self.read_all()
            self.desk.assert_sound()
        for req in list(self.desk.live):
            self.desk.finish(req, is_insert=self.rng.random() < 0.5)
        self.desk.assert_cold_after_evicting_all()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(("page", "window"), [(1, 4), (1, 1), (4, 3), (4, 4), (4, 10)])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_interleaving_keeps_ownership(seed, page, window, dp):
    """D06, D08, D16, D17, D20, D31, D35 and their combinations."""
    Driver(seed, page, window, dp).run(STEPS)
