"""Mutants of the allocators: dedup, mapping, rollback, partial pages, groups, ranks, page geometry."""

from __future__ import annotations

from sgl_jax.tools.mutants.mutant import Mutant

_A = "srt/mem_cache/allocator/"
_SWA, _POOL, _PAGED, _MAP = _A + "swa.py", _A + "rank_pool.py", _A + "paged.py", _A + "mapping.py"

ALLOCATOR: tuple[Mutant, ...] = (
    Mutant("alloc_drop_dedup", _POOL, "        return self.distinct(ids)\n", "        return ids\n"),
    Mutant(
        "alloc_double_free_accepted",
        _POOL,
        "            ids = ids[states == ALLOCATED]\n",
        "            ids = ids[states != RESERVED]\n",
    ),
    Mutant("alloc_group_not_deferred", _POOL, "PENDING if defer else FREE\n", "FREE\n"),
    Mutant(
        "alloc_group_reusable_at_once",
        _POOL,
        "        (self._pending if defer else self._released).append(owned)",
        "        self._released.append(owned)",
    ),
    Mutant("alloc_flush_keeps_queue", _POOL, "            self._pending.size = 0\n", "            pass\n"),
    Mutant(
        "alloc_flush_loses_slots", _POOL, "            self._released.append(ids)\n", "            pass\n"
    ),
    Mutant(
        "alloc_take_one_too_many",
        _POOL,
        "            if n > self.available:\n",
        "            if n > self.available + 1:\n",
    ),
    Mutant(
        "alloc_rewind_forgets_state",
        _POOL,
        "        self.state[ids] = FREE\n        self._window, self._head",
        "        self._window, self._head",
    ),
    Mutant(
        "alloc_no_rollback",
        _SWA,
        "                    full.rewind(rank, mark)\n",
        "                    pass\n",
    ),
    Mutant(
        "alloc_swa_failure_ignored",
        _SWA,
        "        if full_slots is None or swa_slots is None:\n            return None\n        self._maps[rank].write_run(full_slots, swa_slots, fill)\n",
        "        if full_slots is None:\n            return None\n        self._maps[rank].write_run(full_slots, full_slots if swa_slots is None else swa_slots, fill)\n",
    ),
    Mutant(
        "alloc_held_count_forgotten",
        _MAP,
        "                self._held[units] = np.count_nonzero(self._rows[units], axis=1)\n",
        "                pass\n",
    ),
    Mutant("alloc_short_page_shows_earlier_life", _MAP, "            row[short:] = 0\n", ""),
    Mutant(
        "alloc_decode_page_not_wiped",
        _SWA,
        "        if fresh.size:\n            mapping.wipe_pages(fresh // self.page_size)\n",
        "",
    ),
    Mutant(
        "alloc_rewind_keeps_the_head",
        _POOL,
        "        self._window, self._head = mark.window, mark.head\n",
        "        self._window = mark.window\n",
    ),
    Mutant("alloc_keep_stale_mapping", _SWA, "        mapping.clear_pages(units, keep_full)\n", ""),
    Mutant("alloc_transfer_copies_mapping", _SWA, "        mapping.clear_tokens(source)\n", ""),
    Mutant("alloc_transfer_keeps_source_full", _SWA, "        self._release_full(owned, source, rank)\n", ""),
    Mutant(
        "alloc_partial_page_released",
        _SWA,
        "        return complete\n",
        "        return np.concatenate((complete, partial))\n",
    ),
    Mutant(
        "alloc_partial_page_silent_in_strict",
        _SWA,
        "        if partial.size and self.strict:\n",
        "        if False:\n",
    ),
    Mutant("alloc_continue_unmapped", _SWA, "        if unmapped.any():\n", "        if False:\n"),
    Mutant(
        "alloc_free_full_frees_swa",
        _SWA,
        "        self._release_full(self.full_attn_allocator.owned_units(units, rank), indices, rank)\n",
        "        self._release_full(self.full_attn_allocator.owned_units(units, rank), indices, rank)\n        self._release_swa(units, rank, keep_full=True)\n",
    ),
    Mutant(
        "alloc_free_skips_swa",
        _SWA,
        "        self._release_swa(units, rank, keep_full=False)\n        self._release_full(full_owned",
        "        self._release_full(full_owned",
    ),
    Mutant(
        "alloc_cascade_outlives_an_alloc",
        _SWA,
        "        self._cascade = None  # pages may get new owners\n",
        "",
    ),
    Mutant("alloc_cascade_of_any_rank", _SWA, " and cascade.rank == rank:\n", ":\n"),
    Mutant("alloc_cascade_of_any_array", _SWA, " and cascade.slots is free_index and", " and"),
    Mutant("alloc_cascade_of_a_writable_array", _SWA, " or slots.flags.writeable:\n", ":\n"),
    Mutant(
        "alloc_few_ids_are_distinct",
        _POOL,
        "            if n < 2 or len(set(ids.tolist())) == n:\n",
        "            if True:\n",
    ),
    Mutant("alloc_clear_keeps_mapping", _SWA, "        self._maps[rank].clear()\n", ""),
    Mutant(
        "alloc_rank_zero_mapping",
        _SWA,
        "        self._maps[rank].write_run(full_slots, swa_slots, 0)\n",
        "        self._maps[0].write_run(full_slots, swa_slots, 0)\n",
    ),
    Mutant(
        "alloc_omitted_rank_is_zero",
        _A + "base.py",
        "        if dp_size == 1:\n            return 0\n",
        "        if dp_size >= 1:\n            return 0\n",
    ),
    Mutant(
        "alloc_pages_rounded_down",
        _A + "extend.py",
        "    pages = -(-seq // page_size) - -(-prefix // page_size)\n",
        "    pages = seq // page_size - -(-prefix // page_size)\n",
    ),
    Mutant(
        "alloc_decode_crossing_off_by_one",
        _PAGED,
        "        crosses = (seq - 1) % self.page_size == 0\n",
        "        crosses = seq % self.page_size == 0\n",
    ),
    Mutant(
        "alloc_available_is_maximum",
        _SWA,
        "        return min(self.full_available_size",
        "        return max(self.full_available_size",
    ),
    Mutant(
        "alloc_transfer_part_of_target",
        _A + "transfer.py",
        "named_pages(target, page_size, view.live_tokens).partial",
        "source[:0]",
    ),
    Mutant(
        "alloc_translate_ignores_gaps",
        _SWA,
        "        if require_mapped and np.count_nonzero(swa_slots) != swa_slots.size:\n",
        "        if False:\n",
    ),
)
