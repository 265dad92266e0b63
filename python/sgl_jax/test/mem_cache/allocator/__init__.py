"""Allocator tests mirror ``mem_cache/allocator``."""
