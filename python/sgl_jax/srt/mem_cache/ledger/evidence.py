"""Proof that a snapshot changed nothing (fingerprint), and the folder an idle violation leaves behind (crash bundle)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgl_jax.srt.mem_cache.ledger.snapshot import event_totals
from sgl_jax.srt.mem_cache.ledger.source import rank_view

#: Cache operations a crash bundle keeps, the last ones.
MAX_OPERATIONS = 1000


def readonly_fingerprint(cache: Any, live_reqs: Iterable[Any] = ()) -> str:
    """Hex digest of all ownership state: free structures, mappings, node values and locks, rows, counters, every rank.

    Equal before and after an operation means the operation moved no ownership. Reads only.
    """
    allocator = cache.token_to_kv_pool_allocator
    requests = list(live_reqs)
    digest = hashlib.blake2b(digest_size=16)
    for rank in range(int(getattr(allocator, "dp_size", 1))):
        view = rank_view(cache, rank, requests)
        for array in (view.full.free, view.swa.free, view.mapping):
            digest.update(b"|" + np.ascontiguousarray(array).tobytes())
        for node in view.nodes:
            digest.update(f"n{node.node_id},{node.full_locked},{node.swa_locked}".encode())
            for value in (node.full, node.swa):
                digest.update(b"-" if value is None else np.ascontiguousarray(value).tobytes())
        for row in view.rows:
            digest.update(f"r{row.row},{row.start},{row.swa_from}".encode() + row.full.tobytes())
        counters = [
            getattr(cache, name)(rank)
            for name in (
                "full_evictable_size",
                "full_protected_size",
                "swa_evictable_size",
                "swa_protected_size",
            )
        ]
        digest.update(repr((rank, counters, sorted(event_totals(cache, rank).items()))).encode())
    return digest.hexdigest()


def _free_folder(parent: Path) -> Path:
    stem = time.strftime("cache-violation-%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = parent / (stem if attempt == 0 else f"{stem}-{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent} already holds 1000 bundles named {stem}-*: remove old ones")


def write_crash_bundle(
    directory: str | Path,
    ledger: Sequence[Mapping[str, int]],
    tree_text: str,
    op_log: Iterable[Any],
    resolved_args: Mapping[str, Any],
) -> Path:
    """Write ``ledger.json``, ``tree.txt``, ``operations.jsonl`` (last 1,000) and ``args.json`` into a new folder.

    Returns the folder. Values JSON does not know are written as text, so that a bundle never fails on its content.
    """
    folder = _free_folder(Path(directory))
    (folder / "ledger.json").write_text(json.dumps([dict(s) for s in ledger], indent=2) + "\n")
    (folder / "tree.txt").write_text(tree_text if tree_text.endswith("\n") else tree_text + "\n")
    lines = [
        json.dumps(op._asdict() if hasattr(op, "_asdict") else op, default=str)
        for op in list(op_log)[-MAX_OPERATIONS:]
    ]
    (folder / "operations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "args.json").write_text(
        json.dumps(dict(resolved_args), indent=2, default=str, sort_keys=True) + "\n"
    )
    return folder
