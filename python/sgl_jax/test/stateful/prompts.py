"""Prompts that collide: pages of very few kinds, two of which differ only in their last token."""

from __future__ import annotations


def page_kinds(page: int) -> list[list[int]]:
    """Three pages: ``a``, ``a`` with another last token (diverges inside the page), and a different one."""
    if page == 1:
        return [[1], [2], [3]]
    return [[1] * page, [1] * (page - 1) + [2], [3] * page]


def make_prompt(page: int, blocks: int, shape: int, seed: int) -> list[int]:
    """``shape`` picks the length, ``seed`` the path; most pages are kind 0, so that prefixes are shared."""
    count = shape % (blocks + 1)
    tail = (shape // (blocks + 1)) % page
    kinds = page_kinds(page)
    tokens: list[int] = []
    for i in range(count):
        digit = (seed >> (2 * i)) & 3
        tokens += kinds[0 if digit < 2 else digit - 1]
    tokens += kinds[0][:1] * tail
    return tokens if tokens else [1]


def next_token(page: int, position: int, draw: int) -> int:
    """A generated token: usually the one that continues kind 0, now and then a divergence."""
    if draw % 5 == 0:
        return 2 if position % page == page - 1 else 3
    return 1
