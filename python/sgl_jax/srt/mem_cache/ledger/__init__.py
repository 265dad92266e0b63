"""Ownership ledger (RFC-0035 section 6): schema, snapshot, audit, fingerprint and crash bundle.

Internal and test-only surface: read-only, never a stable API.
"""

from sgl_jax.srt.mem_cache.ledger.audit import (
    LedgerAuditError,
    SlotOwner,
    SlotReport,
    audit_cache,
    diff,
    validate_swa_cache_ledger,
    violations,
    who_owns,
)
from sgl_jax.srt.mem_cache.ledger.evidence import readonly_fingerprint, write_crash_bundle
from sgl_jax.srt.mem_cache.ledger.schema import EVENT_NAMES, LEDGER_FIELDS, CacheLedger
from sgl_jax.srt.mem_cache.ledger.snapshot import build_snapshot
from sgl_jax.srt.mem_cache.ledger.source import OwnedNode

__all__ = [
    "EVENT_NAMES",
    "LEDGER_FIELDS",
    "CacheLedger",
    "LedgerAuditError",
    "OwnedNode",
    "SlotOwner",
    "SlotReport",
    "audit_cache",
    "build_snapshot",
    "diff",
    "readonly_fingerprint",
    "validate_swa_cache_ledger",
    "violations",
    "who_owns",
    "write_crash_bundle",
]
