"""The corners of the matrix: page 1/4/128/256, windows smaller, equal and larger than a page, one and two ranks."""

from __future__ import annotations

from sgl_jax.test.stateful.build import WorldConfig

SMALL: tuple[WorldConfig, ...] = (
    WorldConfig(page=1, window=4),
    WorldConfig(page=1, window=4, dp=2, full_pages=30, swa_pages=20),
    WorldConfig(page=1, window=1, full_pages=24, swa_pages=14),
    WorldConfig(page=1, window=7, full_pages=60, swa_pages=30, blocks=16, chunk=5),
    WorldConfig(page=4, window=4, full_pages=20, swa_pages=14, blocks=6, chunk=2),
    WorldConfig(page=4, window=3, dp=2, full_pages=16, swa_pages=12, blocks=5, chunk=2),
    WorldConfig(page=4, window=9, full_pages=24, swa_pages=16, blocks=7, chunk=3),
    WorldConfig(page=4, window=8, dp=2, full_pages=18, swa_pages=18, blocks=6, chunk=1),
    WorldConfig(page=1, window=4, cache="chunk", full_pages=50, swa_pages=30),
    WorldConfig(page=4, window=6, dp=2, cache="chunk", full_pages=16, swa_pages=12, blocks=5, chunk=2),
)
BIG: tuple[WorldConfig, ...] = (
    WorldConfig(page=128, window=128, full_pages=12, swa_pages=9, blocks=5, chunk=2, rows=4),
    WorldConfig(page=128, window=300, dp=2, full_pages=14, swa_pages=11, blocks=5, chunk=2, rows=4),
    WorldConfig(page=256, window=128, full_pages=11, swa_pages=8, blocks=4, chunk=2, rows=4),
    WorldConfig(page=256, window=256, dp=2, full_pages=10, swa_pages=8, blocks=4, chunk=1, rows=4),
    WorldConfig(page=128, window=100, cache="chunk", full_pages=12, swa_pages=9, blocks=5, chunk=2, rows=4),
)
ALL = SMALL + BIG
