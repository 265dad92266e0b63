"""Comparison of implementation and oracle after a step: pools, tree, rows, mapping, locks, sums, invariants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_jax.srt.mem_cache.page import ceil_page
from sgl_jax.test.oracle.observe import NodeView, free_pages, walk
from sgl_jax.test.oracle.pool import Mismatch
from sgl_jax.test.oracle.tree import Cell

if TYPE_CHECKING:
    from sgl_jax.test.stateful.desk import Desk


def need(condition: bool, message: str) -> None:
    if not condition:
        raise Mismatch(message)


def pair_nodes(world: Desk, views: list[NodeView]) -> list[tuple[int, NodeView, list[Cell | None]]]:
    """Each node with its rank and the oracle cells it covers; None where the oracle has no such page."""
    size, out = world.cfg.page, []
    last: dict[int, Cell | None] = {}
    for view in views:
        key = view.node.key
        rank = key.dp_rank if key.dp_rank is not None else 0
        need(
            len(view.tokens) > 0 and len(view.tokens) % size == 0,
            f"node {view.node.id} has {len(view.tokens)} tokens",
        )
        need(
            len(view.full) == len(view.tokens),
            f"node {view.node.id}: {len(view.full)} FULL slots, {len(view.tokens)} tokens",
        )
        at: Cell | None = last[view.parent.node.id] if view.parent else world.tree.root(rank, key.extra_key)
        cells: list[Cell | None] = []
        for i in range(0, len(view.tokens), size):
            at = at.children.get(tuple(view.tokens[i : i + size])) if at is not None else None
            cells.append(at)
        last[view.node.id] = at
        out.append((rank, view, cells))
    return out


@dataclass(slots=True)
class Vanished:
    """What an eviction took: ``freed[rank]`` = [FULL, SWA] tokens; live pages removed and pages tombstoned."""

    freed: list[list[int]]
    removed: list[tuple[int, Cell]] = field(default_factory=list)
    stoned: list[tuple[int, Cell]] = field(default_factory=list)


def absorb_evictions(world: Desk) -> Vanished:
    """After a call that may evict: judge what vanished and tell the oracle."""
    size = world.cfg.page
    seen: set[int] = set()
    gone = Vanished([[0, 0] for _ in range(world.cfg.dp)])
    for rank, view, cells in pair_nodes(world, walk(world.cache)):
        for cell in cells:
            need(cell is not None, f"eviction left an unknown node {view.node.id} tokens {view.tokens[:8]}")
            assert cell is not None
            seen.add(id(cell))
            if world.dual and view.swa is None and cell.swa is not None:
                gone.stoned.append((rank, cell))
    for rank, cell in gone.stoned:
        world.tree.tombstone(rank, cell)
        gone.freed[rank][1] += size
    for rank, cell in reversed([(r, c) for r, c in world.tree.cells() if id(c) not in seen]):
        gone.freed[rank][0] += size
        if cell.swa is not None:
            gone.freed[rank][1] += size
            gone.removed.append((rank, cell))
        world.tree.drop(rank, cell)
    return gone


def judge_eviction(world: Desk, rank: int, wanted: tuple[int, int], gone: Vanished) -> None:
    """Enough or everything; no more than one node too many; FULL takes the least recently used leaves."""
    sums, (full, swa) = world.tree.sums(rank), wanted
    got = gone.freed[rank]
    for r in range(world.cfg.dp):
        need(r == rank or gone.freed[r] == [0, 0], f"evict on rank {rank} took {gone.freed[r]} from rank {r}")
    need(got[0] >= full or sums["full_evictable"] == 0, f"[dp={rank}] evict{wanted} gave {got}, left {sums}")
    need(got[1] >= swa or sums["swa_evictable"] == 0, f"[dp={rank}] evict{wanted} gave {got}, left {sums}")
    node = (
        ceil_page(world.cfg.window, world.cfg.page) if world.dual else world.cfg.full_pages * world.cfg.page
    )
    live = len(gone.removed) * world.cfg.page
    if swa == 0:
        need(
            live - node < full or live == 0,
            f"[dp={rank}] evict{wanted} took {live} live tokens, node limit {node}",
        )
        need(
            not gone.stoned, f"[dp={rank}] evict{wanted} made {len(gone.stoned)} tombstones nobody asked for"
        )
        kept = [c for _r, c in world.tree.cells(rank) if not c.children and not c.full_locks]
        oldest_kept = min((c.used for c in kept), default=world.tree.clock)
        late = [c for _r, c in gone.removed if c.used_surely > oldest_kept]
        need(
            not late,
            f"[dp={rank}] evict{wanted} took a leaf used at {late and late[0].used_surely}, kept {oldest_kept}",
        )
    elif full == 0:
        need(got[1] - node < swa or got[1] == 0, f"[dp={rank}] evict{wanted} gave {got}, node limit {node}")


def check_tree(world: Desk, views: list[NodeView]) -> None:
    """Every node equals its cells; every cell is covered once; live nodes are window-bounded; no dead tombstone."""
    size, limit = world.cfg.page, ceil_page(world.cfg.window, world.cfg.page)
    covered = 0
    for rank, view, cells in pair_nodes(world, views):
        name = f"[dp={rank}] node {view.node.id} [{view.start},{view.end})"
        covered += len(cells)
        for i, cell in enumerate(cells):
            need(cell is not None, f"{name} is not in the oracle: tokens {view.tokens[:8]}")
            assert cell is not None
            part = slice(i * size, (i + 1) * size)
            need(view.full[part] == cell.full, f"{name} FULL {view.full[part][:4]}, oracle {cell.full[:4]}")
            swa = cell.full if not world.dual else None if view.swa is None else view.swa[part]
            need(swa == cell.swa, f"{name} SWA {swa and swa[:4]}, oracle {cell.swa and cell.swa[:4]}")
            need(
                view.full_lock == cell.full_locks,
                f"{name} FULL locks {view.full_lock}, oracle {cell.full_locks}",
            )
            if world.dual and cell.swa is not None:
                need(
                    view.swa_lock == cell.swa_locks,
                    f"{name} SWA locks {view.swa_lock}, oracle {cell.swa_locks}",
                )
        need(view.swa is None or len(view.swa) == len(view.tokens), f"{name} SWA and key differ in length")
        need(view.swa is None or len(view.tokens) <= limit, f"{name} live but longer than {limit}")
        dead = world.dual and view.swa is None and not view.children and view.full_lock == 0
        need(not dead, f"{name} is a tombstone leaf nobody can match or evict (rule 8)")
    need(
        covered == sum(1 for _ in world.tree.cells()),
        f"tree has {covered} pages, oracle {sum(1 for _ in world.tree.cells())}",
    )


def check_sums(world: Desk) -> None:
    cache = world.cache
    for rank in range(world.cfg.dp):
        want = world.tree.sums(rank)
        for name, value in want.items():
            got = getattr(cache, f"{name}_size")(rank)
            value = value if world.dual or name.startswith("full") else 0
            need(got == value, f"[dp={rank}] {name}_size {got}, oracle {value}")
        need(
            cache.evictable_size(rank) == want["full_evictable"], f"[dp={rank}] evictable_size is not FULL's"
        )
        need(
            cache.protected_size(rank) == want["full_protected"], f"[dp={rank}] protected_size is not FULL's"
        )


def check_available(world: Desk) -> None:
    alloc = world.allocator
    for rank, pool in enumerate(world.pools):
        if not world.dual:
            got = alloc.available_size(rank)
            need(got == pool.full.available(), f"[dp={rank}] available {got}, oracle {pool.full.available()}")
            continue
        full, swa = alloc.full_available_size(rank), alloc.swa_available_size(rank)
        need(
            full == pool.full.available(),
            f"[dp={rank}][full] available {full}, oracle {pool.full.available()}",
        )
        need(swa == pool.swa.available(), f"[dp={rank}][swa] available {swa}, oracle {pool.swa.available()}")
        need(alloc.available_size(rank) == min(full, swa), f"[dp={rank}] available_size is not the minimum")


def check_pools(world: Desk) -> None:
    """Free pages as sets, no duplicates; the whole mapping; every row."""
    cfg, alloc = world.cfg, world.allocator
    for rank, pool in enumerate(world.pools):
        subs = [(alloc, pool.full)]
        if world.dual:
            subs = [(alloc.full_attn_allocator, pool.full), (alloc.swa_attn_allocator, pool.swa)]
        for sub, oracle in subs:
            got, want = free_pages(sub, rank, cfg.page), oracle.free_pages()
            need(
                len(got) == len(set(got)),
                f"[dp={rank}][{oracle.name}] free list repeats pages: {sorted(got)}",
            )
            need(
                set(got) == want,
                f"[dp={rank}][{oracle.name}] free pages differ: {sorted(set(got) ^ want)[:8]}",
            )
        expected = np.zeros((pool.full.pages + 1) * cfg.page, np.int32)
        expected[list(pool.mapping)] = list(pool.mapping.values())
        real = world.mapping(rank) if world.dual else expected
        bad = np.flatnonzero(real != expected)
        need(
            bad.size == 0,
            f"[dp={rank}] mapping differs at {[(int(i), int(real[i]), int(expected[i])) for i in bad[:6]]}",
        )
        need(len(set(pool.mapping.values())) == len(pool.mapping), f"[dp={rank}] one SWA slot mapped twice")
    for shadow in world.live:
        req = shadow.req
        row = world.row(req)[: len(shadow.row)].tolist()
        need(row == shadow.row, f"{req.rid} row {row[:12]}, oracle {shadow.row[:12]}")
        need(
            req.kv_allocated_len == len(shadow.row),
            f"{req.rid} allocated {req.kv_allocated_len}, row {len(shadow.row)}",
        )
        need(
            req.cache_protected_len == shadow.protected,
            f"{req.rid} protected {req.cache_protected_len}, oracle {shadow.protected}",
        )
        need(
            req.swa_evicted_seqlen == shadow.cursor,
            f"{req.rid} cursor {req.swa_evicted_seqlen}, oracle {shadow.cursor}",
        )


def check_self(world: Desk) -> None:
    """The implementation's own invariants and its ledger agree that nothing is wrong."""
    for part in (world.allocator, world.cache):
        violations = part.check()
        need(violations == [], f"check(): {[str(v) for v in violations[:4]]}")
    if world.in_group or not world.dual:
        return
    reqs = [s.req for s in world.live]
    for rank in range(world.cfg.dp):
        check_ledger(world, rank, world.cache.cache_ledger_snapshot(rank, reqs))


def check_ledger(world: Desk, rank: int, snap: dict[str, int]) -> None:
    """Each field of the ledger against a count made here from the oracle (RFC 6, CONTRACT 12)."""
    pool, sums = world.pools[rank], world.tree.sums(rank)
    for name, part in (("full", pool.full), ("swa", pool.swa)):
        tree = sums[f"{name}_evictable"] + sums[f"{name}_protected"]
        busy = len(part.busy_pages()) * world.cfg.page
        want = {
            "capacity": part.pages * world.cfg.page,
            "available": part.available(),
            "tree_evictable": sums[f"{name}_evictable"],
            "tree_protected": sums[f"{name}_protected"],
            "request_owned": len(part.owner) - tree,
            "reserved_page_slack": busy - len(part.owner),
        }
        for key, value in want.items():
            got = snap[f"{name}_{key}"]
            need(got == value, f"[dp={rank}] ledger {name}_{key} {got}, oracle {value}")
        for key in (
            "duplicate_tree_owner",
            "tree_bucket_overlap",
            "duplicate_request_owner",
            "request_tree_overlap",
        ):
            need(
                snap[f"{name}_{key}_count"] == 0,
                f"[dp={rank}] ledger {name}_{key}_count {snap[f'{name}_{key}_count']}",
            )
    for key in ("invalid", "duplicate", "source_mismatch", "owner_mismatch", "pair_mismatch"):
        got = snap[f"mapping_{key}_count"]
        need(got == 0, f"[dp={rank}] ledger mapping_{key}_count {got}")
    need(
        snap["mapping_nonzero_count"] == len(pool.mapping),
        f"[dp={rank}] ledger mapping_nonzero_count {snap['mapping_nonzero_count']}",
    )


def verify(world: Desk, full: bool) -> None:
    """All comparisons; ``full`` adds free lists, mapping, rows, ``check()`` and the ledger."""
    check_available(world)
    if world.unified:
        check_tree(world, walk(world.cache))
        check_sums(world)
    if full:
        check_pools(world)
        check_self(world)


def describe(world: Desk) -> dict[str, Any]:
    """Short picture for a failure message."""
    return {
        "config": world.cfg.label(),
        "live": [(s.req.rid, len(s.row), s.protected, s.cursor) for s in world.live],
        "available": [(p.full.available(), p.swa.available()) for p in world.pools],
    }
