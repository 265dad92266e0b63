"""The corners of the matrix: page 1/4/128/256, windows smaller, equal and larger than a page, one and two ranks."""

from __future__ import annotations

from sgl_jax.test.stateful.build import WorldConfig

SMALL: tuple[WorldConfig, ...] = (
    WorldConfig(page=1, window=4, full_pages=30, swa_pages=18, blocks=12),
    WorldConfig(page=1, window=4, dp=2, full_pages=24, swa_pages=16, blocks=12),
    WorldConfig(page=1, window=1, full_pages=18, swa_pages=12, blocks=10, chunk=5),
    WorldConfig(page=1, window=7, full_pages=44, swa_pages=24, blocks=20, chunk=16),
    WorldConfig(page=4, window=4, full_pages=14, swa_pages=10, blocks=6, chunk=3),
    WorldConfig(page=4, window=3, dp=2, full_pages=12, swa_pages=9, blocks=5, chunk=2),
    WorldConfig(page=4, window=9, full_pages=20, swa_pages=13, blocks=8, chunk=6),
    WorldConfig(page=4, window=8, dp=2, full_pages=15, swa_pages=15, blocks=6, chunk=1),
    WorldConfig(page=1, cache="full", full_pages=26, blocks=12),
    WorldConfig(page=4, dp=2, cache="full", full_pages=13, blocks=6, chunk=2),
    WorldConfig(page=1, window=4, cache="chunk", full_pages=40, swa_pages=26),
    WorldConfig(page=4, window=6, dp=2, cache="chunk", full_pages=14, swa_pages=10, blocks=5, chunk=2),
)
BIG: tuple[WorldConfig, ...] = (
    WorldConfig(page=128, window=128, full_pages=12, swa_pages=9, blocks=5, chunk=2, rows=4),
    WorldConfig(page=128, window=300, dp=2, full_pages=14, swa_pages=11, blocks=5, chunk=2, rows=4),
    WorldConfig(page=256, window=128, full_pages=11, swa_pages=8, blocks=4, chunk=2, rows=4),
    WorldConfig(page=256, window=256, dp=2, full_pages=10, swa_pages=8, blocks=4, chunk=1, rows=4),
    WorldConfig(page=128, window=100, cache="chunk", full_pages=12, swa_pages=9, blocks=5, chunk=2, rows=4),
)
ALL = SMALL + BIG
