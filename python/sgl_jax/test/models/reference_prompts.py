"""The checked-in reference prompts (DECISIONS 20: token equality only where float64 margins stay > 5e-3 along the whole output).

Checkpoint: ``fixtures/refs/gemma4-tiny`` with ``sliding_window`` overridden to 32, 160 or 300.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHECKPOINT = FIXTURES / "refs" / "gemma4-tiny"
#: window -> page sizes it is meant for
WINDOWS = {32: (1, 16), 160: (1, 128), 300: (1, 256)}


@dataclass(frozen=True)
class ReferencePrompt:
    """``output``: the greedy continuation; ``min_margin``: smallest float64 top-1/top-2 gap along it."""

    name: str
    prompt: list[int]
    output: list[int]
    min_margin: float


def reference_prompts(window: int) -> list[ReferencePrompt]:
    """16 prompts of a window: around window and pages, with shared prefixes, divergence and continuation."""
    data = json.loads((FIXTURES / "reference_prompts.json").read_text(encoding="utf-8"))
    return [ReferencePrompt(**entry) for entry in data["windows"][str(window)]]
