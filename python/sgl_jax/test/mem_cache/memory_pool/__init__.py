"""Pool tests mirror ``mem_cache/memory_pool``."""
