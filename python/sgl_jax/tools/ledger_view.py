"""``sgl-jax ledger URL``: who owns the KV slots of a running server, as a table per rank and pool with a one-line verdict.

Exit codes: 0 sound, 1 a violation, 2 the ledger could not be read. The endpoint is internal and needs the server flag
``--enable-cache-report``.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_jax.srt.mem_cache.ledger.audit import diff, violations
from sgl_jax.srt.mem_cache.ledger.schema import EVENT_NAMES, MAPPING_DIAGNOSTICS, POOL_DIAGNOSTICS, POOLS

_COLUMNS = (
    ("capacity", "capacity"),
    ("available", "free"),
    ("tree_evictable", "evictable"),
    ("tree_protected", "protected"),
    ("request_owned", "requests"),
    ("reserved_page_slack", "slack"),
)


class LedgerReadError(RuntimeError):
    """The server gave no ledger; the message says what to do."""


def fetch(url: str, query: Mapping[str, str], api_key: str | None, timeout: float) -> dict[str, Any]:
    """GET the ledger of the server at ``url``. Raises LedgerReadError with the server's reason."""
    base = url if "://" in url else f"http://{url}"
    target = f"{base.rstrip('/')}/get_cache_ledger"
    if query:
        target += "?" + urllib.parse.urlencode(query)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(target, headers=headers), timeout=timeout
        ) as reply:
            body = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace").strip()
        hint = {403: " (start the server with --enable-cache-report)", 401: " (pass --api-key)"}.get(
            error.code, ""
        )
        raise LedgerReadError(f"{target} answered {error.code}{hint}: {text}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise LedgerReadError(f"{target}: {error}; is the server running there?") from error
    if not isinstance(body, dict) or not isinstance(body.get("ranks"), list):
        raise LedgerReadError(f"{target} did not answer a ledger: {str(body)[:200]}")
    return body


def table(snapshots: Sequence[Mapping[str, int]]) -> str:
    """One line per rank and pool; units are token slots."""
    head = ["rank", "pool", *(name for _, name in _COLUMNS), "sum", "faults"]
    rows = [head]
    for snapshot in snapshots:
        for pool in POOLS:
            values = [int(snapshot.get(f"{pool}_{field}", 0)) for field, _ in _COLUMNS]
            faults = sum(int(snapshot.get(f"{pool}_{name}", 0)) for name in POOL_DIAGNOSTICS)
            total = sum(values[1:])
            balance = "= capacity" if total == values[0] else f"{total - values[0]:+d}"
            rows.append([str(snapshot["dp_rank"]), pool, *map(str, values), balance, str(faults)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    for snapshot in snapshots:
        faults = sum(int(snapshot.get(name, 0)) for name in MAPPING_DIAGNOSTICS)
        events = ", ".join(f"{name[:-6].replace('_', ' ')} {snapshot.get(name, 0)}" for name in EVENT_NAMES)
        lines.append(
            f"rank {snapshot['dp_rank']}: {snapshot.get('mapping_nonzero_count', 0)} mapped slots, {faults} mapping faults; "
            f"since start: {events}"
        )
    return "\n".join(lines)


def judge(body: Mapping[str, Any]) -> list[str]:
    """Every violation, recomputed here from the numbers, then those that only the server could see."""
    found = [
        str(item)
        for snapshot in body["ranks"]
        for item in violations(snapshot, require_idle=bool(body.get("idle")))
    ]
    return found + [text for text in body.get("violations", []) if text not in found]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Fields that differ between two saved ledgers, rank by rank."""
    before = {int(s["dp_rank"]): s for s in old["ranks"]}
    lines = []
    for snapshot in new["ranks"]:
        rank = int(snapshot["dp_rank"])
        for name, (was, now) in diff(before.get(rank, {}), snapshot).items():
            lines.append(f"rank {rank}  {name}: {was} -> {now} ({now - was:+d})")
    return "\n".join(lines) if lines else "no field changed"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sgl-jax ledger", description=__doc__)
    parser.add_argument("url", help="server address, e.g. 127.0.0.1:30000")
    parser.add_argument("--slot", type=int, help="say who owns this slot")
    parser.add_argument("--pool", choices=POOLS, help="pool of --slot (default: full)")
    parser.add_argument("--rank", type=int, help="data-parallel rank of --slot (default: 0)")
    parser.add_argument("--diff", type=Path, metavar="FILE", help="compare with a ledger saved by --save")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the answer to FILE")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON instead of tables")
    parser.add_argument("--api-key", help="key of a server that asks for one")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds (default: 30)")
    return parser


def _slot_text(body: Mapping[str, Any], slot: int) -> str:
    owner = body.get("slot")
    if not isinstance(owner, Mapping) or "description" not in owner:
        raise LedgerReadError(
            f"slot {slot}: this server's ledger endpoint does not answer questions about a slot"
        )
    return str(owner["description"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ledger; see the module for the exit codes."""
    parser = _parser()
    options = parser.parse_args(argv)
    query: dict[str, str] = {}
    if options.slot is not None:
        query = {
            "slot": str(options.slot),
            "pool": options.pool or "full",
            "rank": str(options.rank or 0),
        }
    elif options.pool is not None or options.rank is not None:
        parser.error(
            "--pool and --rank say where --slot N is: add --slot, or leave them out for every rank and pool"
        )
    try:
        body = fetch(options.url, query, options.api_key, options.timeout)
        owner = None if options.slot is None else _slot_text(body, options.slot)
        older = json.loads(options.diff.read_text()) if options.diff else None
    except (LedgerReadError, OSError, json.JSONDecodeError) as error:
        print(f"sgl-jax ledger: {error}", file=sys.stderr)
        return 2
    if options.save:
        options.save.write_text(json.dumps(body, indent=2) + "\n")
    found = judge(body)
    if options.json:
        print(json.dumps({**body, "violations": found}, indent=2))
        return 1 if found else 0
    print(
        f"route {body.get('route', '?')}, {'idle' if body.get('idle') else 'busy'}, {len(body['ranks'])} rank(s)"
    )
    print(table(body["ranks"]))
    if older is not None:
        print(changes(older, body))
    if owner is not None:
        print(owner)
    for text in found:
        print(f"  {text}")
    print(f"VIOLATED: {len(found)} broken rule(s)" if found else "sound: every slot has exactly one owner")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
