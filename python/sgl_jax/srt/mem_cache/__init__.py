"""Cache subsystem: page maths, allocators, pools, radix trees, caches and the ownership ledger."""
