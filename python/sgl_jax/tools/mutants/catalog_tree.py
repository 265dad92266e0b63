"""Mutants of the unified tree: match, insert, healing, split, eviction, sums, candidates and locks."""

from __future__ import annotations

from sgl_jax.tools.mutants.mutant import Mutant

_M = "srt/mem_cache/"
_U, _C = _M + "unified_radix_cache/", _M + "unified_cache_components/"
_SWA, _LOCK, _FULL = _C + "swa_component.py", _C + "swa_lock.py", _C + "full_component.py"
_ACC, _TREE, _CACHE, _INS = _U + "accounts.py", _U + "tree.py", _U + "cache.py", _U + "insertion.py"

MATCH: tuple[Mutant, ...] = (
    Mutant(
        "match_no_reset_at_tombstone",
        _SWA,
        "                live = 0\n                return False\n",
        "                return False\n",
    ),
    Mutant(
        "match_window_minus_one",
        _SWA,
        "            return live >= window\n",
        "            return live >= window - 1\n",
    ),
    Mutant(
        "match_window_strictly_more",
        _SWA,
        "            return live >= window\n",
        "            return live > window\n",
    ),
    Mutant(
        "match_gap_free_needs_window",
        _SWA,
        '        live: float = float("inf")\n',
        "        live: float = 0\n",
    ),
    Mutant(
        "match_key_not_page_aligned",
        _CACHE,
        "        return key if aligned == key.length else key[:aligned]\n",
        "        return key\n",
    ),
    Mutant(
        "match_aux_miss_ends_path",
        _U + "matching.py",
        "        if usable:\n            accepted = len(chunks)\n",
        "        if not usable:\n            break\n        accepted = len(chunks)\n",
    ),
    Mutant(
        "refresh_one_page_short", _M + "window.py", "    return window + page_size\n", "    return window\n"
    ),
    Mutant("refresh_whole_path", _SWA, "            budget -= at.key.length\n", ""),
    Mutant(
        "refresh_tombstones_are_free",
        _SWA,
        "                fresh.append(at)\n            budget -= at.key.length\n",
        "                fresh.append(at)\n                budget -= at.key.length\n",
    ),
    Mutant(
        "split_not_page_aligned",
        _TREE,
        ", self.page_size)\n        if shared == 0:\n",
        ", 1)\n        if shared == 0:\n",
    ),
    Mutant(
        "split_keeps_views",
        _TREE,
        "                    data.value = data.value.copy()\n",
        "                    pass\n",
    ),
    Mutant(
        "split_forgets_full_lock",
        _FULL,
        "        upper.below = 1 if lower.locked else 0\n",
        "        upper.below = 0\n",
    ),
    Mutant(
        "split_forgets_swa_lock", _C + "tree_component.py", "        upper.lock_ref = lower.lock_ref\n", ""
    ),
    Mutant(
        "walk_leaves_no_stamp",
        _FULL,
        "            node.access_time = get_and_increase_time_counter()\n",
        "            pass\n",
    ),
    Mutant(
        "removed_leaf_takes_its_age_along",
        _TREE,
        "        parent.access_time = max(parent.access_time, leaf.access_time)\n",
        "",
    ),
    Mutant(
        "split_copies_uuid",
        _SWA,
        "        new_parent.component_data[SWA].boundary, lower.boundary = lower.boundary, None\n",
        "        new_parent.component_data[SWA].boundary = lower.boundary\n",
    ),
    Mutant(
        "split_loses_uuid",
        _SWA,
        "        new_parent.component_data[SWA].boundary, lower.boundary = lower.boundary, None\n",
        "        lower.boundary = None\n",
    ),
)

INSERT: tuple[Mutant, ...] = (
    Mutant(
        "heal_ignores_cursor",
        _SWA,
        "        boundary = max(params.swa_evicted_seqlen, params.prev_prefix_len)\n",
        "        boundary = params.prev_prefix_len\n",
    ),
    Mutant(
        "heal_ignores_protected",
        _SWA,
        "        boundary = max(params.swa_evicted_seqlen, params.prev_prefix_len)\n",
        "        boundary = params.swa_evicted_seqlen\n",
    ),
    Mutant(
        "heal_never",
        _SWA,
        "        if first >= prefix_len:\n            return prefix_len\n",
        "        return prefix_len\n",
    ),
    Mutant(
        "heal_only_whole_nodes",
        _SWA,
        "        if first >= prefix_len:\n            return prefix_len\n",
        "        if first > 0:\n            return prefix_len\n",
    ),
    Mutant(
        "heal_replaces_full_under_lock",
        _SWA,
        "        if node.full_data.locked:\n            applier.move_mapping",
        "        if False:\n            applier.move_mapping",
    ),
    Mutant(
        "heal_frees_both_halves_of_old",
        _SWA,
        "            applier.free_full(old, rank)\n",
        "            applier.free(fresh, rank)\n",
    ),
    Mutant("heal_leaks_old_full", _SWA, "            applier.free_full(old, rank)\n", ""),
    Mutant(
        "heal_consumes_nothing",
        _SWA,
        "        self._adopt(node, value_slice[first:prefix_len])\n        return first\n",
        "        self._adopt(node, value_slice[first:prefix_len])\n        return prefix_len\n",
    ),
    Mutant(
        "heal_without_window_cuts",
        _SWA,
        "        cuts += window_cuts(live_from, node.key.length, self._limit)\n",
        "",
    ),
    Mutant(
        "leaf_ignores_cursor",
        _SWA,
        "        live_from = min(max(start, self._cursor(params)), end)\n        if live_from > start:\n",
        "        live_from = start\n        if live_from > start:\n",
    ),
    Mutant(
        "leaf_cursor_off_by_a_page",
        _SWA,
        "        live_from = min(max(start, self._cursor(params)), end)\n        if live_from > start:\n",
        "        live_from = min(max(start, self._cursor(params) + self.cache.page_size), end)\n        if live_from > start:\n",
    ),
    Mutant(
        "insert_skips_cursor",
        _SWA,
        '        insert_params.swa_evicted_seqlen = int(getattr(req, "swa_evicted_seqlen", 0))\n',
        "        pass\n",
    ),
    Mutant(
        "insert_keeps_duplicates",
        _INS,
        "            facts.surrendered.append(part[duplicate_from:consumed])\n",
        "            pass\n",
    ),
    Mutant(
        "insert_frees_protected_prefix",
        _INS,
        "        duplicate_from = max(0, params.prev_prefix_len - offset)\n",
        "        duplicate_from = 0\n",
    ),
    Mutant(
        "insert_maximum_boundary",
        _INS,
        "            consumed = min(consumed, taken)\n",
        "            consumed = max(consumed, taken)\n",
    ),
    Mutant(
        "insert_drops_surrendered",
        _CACHE,
        "        for slots in facts.surrendered:\n            self.applier.free(slots, rank)\n",
        "",
    ),
    Mutant(
        "insert_frees_on_rank_zero",
        _CACHE,
        "            self.applier.free(slots, rank)\n",
        "            self.applier.free(slots, 0)\n",
    ),
    Mutant(
        "insert_leaf_value_is_a_view",
        _FULL,
        "params.value[low:high].copy()",
        "params.value[low:high]",
    ),
)

EVICT: tuple[Mutant, ...] = (
    Mutant("attach_is_not_a_use", _TREE, "        leaf.access_time = get_and_increase_time_counter()\n", ""),
    Mutant(
        "cut_keeps_the_old_slot",
        _TREE,
        "child.parent, child.slot = upper, self.child_key(child.key)\n            upper.children[child.slot]",
        "child.parent = upper\n            upper.children[self.child_key(child.key)]",
    ),
    Mutant(
        "removed_leaf_keeps_its_sum", _ACC, "            self.evictable[FULL][rank] -= len(data.value)\n", ""
    ),
    Mutant("removed_leaf_keeps_its_value", _ACC, "            data.value = None\n", ""),
    Mutant(
        "evict_swa_keeps_slots", _SWA, "        self.cache.applier.free_swa(node.full_data.value, rank)\n", ""
    ),
    Mutant("evict_swa_keeps_value", _SWA, "        self.cache.accounts.set_value(node, SWA, None)\n", ""),
    Mutant("evict_full_keeps_slots", _FULL, "        self.cache.applier.free_full(value, rank)\n", ""),
    Mutant(
        "evict_swa_leaf_becomes_tombstone",
        _SWA,
        "            if accounts.is_leaf(node):\n",
        "            if False:\n",
    ),
    Mutant("evict_swa_removes_locked_leaf", _ACC, "            and not node.in_use\n", ""),
    Mutant(
        "evict_takes_swa_locked",
        _ACC,
        "            if attached and data.value is not None and data.lock_ref <= 0:\n",
        "            if attached and data.value is not None:\n",
    ),
    Mutant(
        "evict_no_cascade",
        _CACHE,
        "            if not self.accounts.is_barren(at):\n                return at\n",
        "            return at\n",
    ),
    Mutant(
        "evict_rank_zero",
        _FULL,
        "        rank, accounts = params.dp_rank or 0,",
        "        rank, accounts = 0,",
    ),
    Mutant(
        "evict_parent_out_of_turn",
        _FULL,
        "            leaf = parent if parent.access_time == age and accounts",
        "            leaf = parent if accounts",
    ),
    Mutant(
        "evict_swa_rank_zero",
        _SWA,
        "        rank = params.dp_rank or 0\n        accounts",
        "        rank = 0\n        accounts",
    ),
    Mutant(
        "evict_stops_one_short",
        _FULL,
        "        while tracker[FULL] < params.num_tokens:\n",
        "        while tracker[FULL] + 1 < params.num_tokens:\n",
    ),
    Mutant(
        "evict_barren_stay_after_unlock",
        _CACHE,
        "        if self.accounts.is_barren(node):\n            self._evict_device_leaf(node, dict.fromkeys(ComponentType, 0))\n",
        "",
    ),
    Mutant(
        "evict_ignores_cold_order",
        _SWA,
        "    return get_and_increase_time_counter() - _COLD\n",
        "    return get_and_increase_time_counter()\n",
    ),
    Mutant(
        "alloc_evicts_full_deficit_only",
        _M + "common.py",
        "        swa = max(0, num_tokens - allocator.swa_available_size(dp_rank=dp_rank))\n",
        "        swa = 0\n",
    ),
    Mutant(
        "alloc_evicts_tokens_not_pages",
        _M + "common.py",
        "    return int(pages.sum()) * page_size\n",
        "    return int((seq - prefix).sum())\n",
    ),
    Mutant(
        "alloc_evicts_on_rank_zero",
        _M + "common.py",
        "swa_num_tokens=swa, dp_rank=dp_rank))\n",
        "swa_num_tokens=swa, dp_rank=0))\n",
    ),
)

LOCKS: tuple[Mutant, ...] = (
    Mutant(
        "lock_window_minus_one",
        _LOCK,
        "                if live >= self._window:\n",
        "                if live >= self._window - 1:\n",
    ),
    Mutant(
        "lock_goes_to_the_root",
        _LOCK,
        "                if live >= self._window:\n",
        "                if False:\n",
    ),
    Mutant(
        "lock_counts_tombstones",
        _LOCK,
        "                skipped.append(at.id)\n",
        "                skipped.append(at.id)\n                live += at.key.length\n",
    ),
    Mutant(
        "unlock_ignores_spans",
        _LOCK,
        "            if distance >= low:\n                yield at\n",
        "            yield at\n",
    ),
    Mutant(
        "unlock_picks_any_grant",
        _LOCK,
        "            same = [g for g in same if g.spans == params.swa_spans]\n",
        "            same = held\n",
    ),
    Mutant(
        "unlock_forgets_the_grant", _LOCK, "        entry[1].remove(grant)\n", "        entry[1].clear()\n"
    ),
    Mutant(
        "unlock_skips_swa",
        _LOCK,
        "            self._host.accounts.change_lock(at, SWA, -1)\n        entry",
        "            pass\n        entry",
    ),
    Mutant(
        "lock_sums_not_moved", _ACC, "            self.protected[ct][rank] += -size if was else size\n", ""
    ),
    Mutant(
        "full_lock_stops_early",
        _ACC,
        "            above.below += step\n",
        "            above.below += step if step > 0 else 0\n",
    ),
    Mutant("full_lock_sum_not_moved", _ACC, "        self.protected[FULL][rank] += step * moved\n", ""),
    Mutant(
        "value_under_lock_counts_evictable",
        _ACC,
        "            locked = full.own > 0 or full.below > 0 if ct is FULL else data.lock_ref > 0\n            (self.protected",
        "            locked = False\n            (self.protected",
    ),
    Mutant(
        "lock_not_synced",
        _ACC,
        "            self.protected[ct][rank] += -size if was else size\n            self._unfiled[rank][node.id] = node\n",
        "            self.protected[ct][rank] += -size if was else size\n",
    ),
)
