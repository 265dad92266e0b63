"""Mutants of the request's life: window maths, reclaim, commit, release, chunk cache, receipts, transactions."""

from __future__ import annotations

from sgl_jax.tools.mutants.mutant import Mutant

_M = "srt/mem_cache/"
_WINDOW, _LIFE, _CHUNK = _M + "window.py", _M + "unified_radix_cache/lifecycle.py", _M + "chunk_cache.py"

REQUEST: tuple[Mutant, ...] = (
    Mutant(
        "reclaim_one_page_more",
        _WINDOW,
        "pre_len - window - page_size), page_size)\n",
        "pre_len - window), page_size)\n",
    ),
    Mutant(
        "reclaim_one_page_less",
        _WINDOW,
        "pre_len - window - page_size), page_size)\n",
        "pre_len - window - 2 * page_size), page_size)\n",
    ),
    Mutant(
        "reclaim_not_floored",
        _WINDOW,
        "    new = floor_page(max(old, pre_len - window - page_size), page_size)\n",
        "    new = max(old, pre_len - window - page_size)\n",
    ),
    Mutant(
        "reclaim_ignores_protected", _WINDOW, "    old = max(evicted, protected)\n", "    old = evicted\n"
    ),
    Mutant("reclaim_forgets_cursor", _WINDOW, "    old = max(evicted, protected)\n", "    old = protected\n"),
    Mutant(
        "reclaim_cursor_moves_back",
        _LIFE,
        "        req.swa_evicted_seqlen = max(evicted, new)\n",
        "        req.swa_evicted_seqlen = new - self._cache.page_size\n",
    ),
    Mutant(
        "reclaim_leaks",
        _LIFE,
        "            cache.applier.free_swa(self._row(req)[old:new], rank)\n",
        "            pass\n",
    ),
    Mutant(
        "reclaim_on_rank_zero",
        _LIFE,
        "            cache.applier.free_swa(self._row(req)[old:new], rank)\n",
        "            cache.applier.free_swa(self._row(req)[old:new], 0)\n",
    ),
    Mutant(
        "reclaim_frees_from_row_start",
        _LIFE,
        "self._row(req)[old:new], rank)\n",
        "self._row(req)[:new], rank)\n",
    ),
    Mutant(
        "commit_does_not_repoint_the_row",
        _LIFE,
        "                self._repoint(row, facts.end, protected)\n",
        "                pass\n",
    ),
    Mutant(
        "commit_keeps_old_receipt",
        _LIFE,
        "        if old is not None:\n            cache.dec_lock_ref(old, receipt)\n",
        "",
    ),
    Mutant(
        "commit_keeps_old_node",
        _LIFE,
        "        req.last_node = node\n        store_receipt",
        "        store_receipt",
    ),
    Mutant(
        "commit_keeps_protected_length",
        _LIFE,
        "        req.last_matched_prefix_len = req.cache_protected_len = matched\n",
        "        req.last_matched_prefix_len = matched\n",
    ),
    Mutant("commit_may_skip_the_leaf", _LIFE, "params, keep_leaf=True, rid", "params, keep_leaf=False, rid"),
    Mutant(
        "finish_frees_the_whole_row",
        _LIFE,
        "                cache.applier.free(row[params.prev_prefix_len : kept], rank)\n",
        "                cache.applier.free(row[:kept], rank)\n",
    ),
    Mutant(
        "finish_leaks_without_insert",
        _LIFE,
        "                cache.applier.free(row[params.prev_prefix_len : kept], rank)\n",
        "                pass\n",
    ),
    Mutant("finish_leaks_the_tail", _LIFE, "            cache.applier.free(row[kept:end], rank)\n", ""),
    Mutant(
        "finish_tail_from_aligned_only",
        _LIFE,
        "        kept = max(key.length, params.prev_prefix_len)\n",
        "        kept = key.length + self._cache.page_size\n",
    ),
    Mutant(
        "finish_keeps_the_lock",
        _LIFE,
        "            if req.last_node is not None:\n                cache.dec_lock_ref(",
        "            if False:\n                cache.dec_lock_ref(",
    ),
    Mutant(
        "finish_keeps_the_receipt",
        _LIFE,
        '                cache.dec_lock_ref(req.last_node, getattr(req, "cache_lock_params", None))\n        store_receipt(req, None)\n',
        '                cache.dec_lock_ref(req.last_node, getattr(req, "cache_lock_params", None))\n',
    ),
    Mutant(
        "finish_ignores_is_insert",
        _LIFE,
        "            if is_insert and key.length:\n",
        "            if key.length:\n",
    ),
    Mutant(
        "key_not_page_aligned",
        _LIFE,
        "            return build_radix_key(req, floor_page(length, page_size))\n",
        "            return build_radix_key(req, length)\n",
    ),
    Mutant(
        "request_of_a_reset_tree",
        _LIFE,
        "        if node.parent is None or not cache.tree.owns(node):\n",
        "        if False:\n",
    ),
    Mutant(
        "request_without_rank",
        _M + "unified_cache_components/receipts.py",
        '    if ranks > 1 and getattr(req, "dp_rank", None) is None:\n',
        "    if False:\n",
    ),
    Mutant(
        "reclaim_without_rank",
        _M + "unified_cache_components/receipts.py",
        "        if ranks > 1:\n",
        "        if False:\n",
    ),
    Mutant(
        "mirror_lags_behind",
        _M + "unified_cache_components/receipts.py",
        "    req.swa_uuid_for_lock = None if result is None else result.swa_uuid_for_lock\n",
        "    pass\n",
    ),
    Mutant(
        "chunk_finish_leaks",
        _CHUNK,
        "            self.token_to_kv_pool_allocator.free(slots, dp_rank=own_rank(req))\n",
        "            pass\n",
    ),
    Mutant(
        "chunk_finish_on_rank_zero",
        _CHUNK,
        "            self.token_to_kv_pool_allocator.free(slots, dp_rank=own_rank(req))\n",
        "            self.token_to_kv_pool_allocator.free(slots, dp_rank=0)\n",
    ),
    Mutant(
        "chunk_reclaim_forgets_cursor",
        _CHUNK,
        "        req.swa_evicted_seqlen = max(evicted, new)\n",
        "        pass\n",
    ),
    Mutant(
        "chunk_window_unchecked",
        _CHUNK,
        "        if sliding_window_size is None or sliding_window_size <= 0:\n",
        "        if sliding_window_size is None:\n",
    ),
    Mutant("chunk_shares_the_row", _CHUNK, "[: len(req.fill_ids)].copy()\n", "[: len(req.fill_ids)]\n"),
    Mutant(
        "window_unchecked",
        _M + "unified_cache_components/swa_component.py",
        "        if window is None or window <= 0:\n",
        "        if window is None:\n",
    ),
    Mutant(
        "live_nodes_twice_the_window",
        _WINDOW,
        "    return ceil_page(window, page_size)\n",
        "    return 2 * ceil_page(window, page_size)\n",
    ),
)
