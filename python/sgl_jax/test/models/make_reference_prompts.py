"""Find the reference prompts: token equality is asked only where float64 leaves no doubt.

usage: python -m sgl_jax.test.models.make_reference_prompts     (rewrites test/fixtures/reference_prompts.json, a few minutes)

For each window the prompts have lengths around windows and pages, share prefixes, diverge inside the window and continue one
another. A prompt is accepted when, along its whole greedy continuation, the top-1 logit leads by more than 5e-3, no stop token comes, and
the continuation would differ if window layers saw everything (for prompts longer than the window).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_jax.test.models.gemma4_oracle import Gemma4Oracle

FIXTURES = Path(__file__).parents[1] / "fixtures"
CHECKPOINT = FIXTURES / "refs" / "gemma4-tiny"
OUT = FIXTURES / "reference_prompts.json"
WINDOWS = (32, 160, 300)
STEPS, MARGIN = 32, 5e-3
BOS, STOPS, FIRST_TEXT, VOCAB = 2, {1, 5}, 16, 384


@dataclass(frozen=True)
class Wish:
    """A prompt to find: ``base`` is kept, ``fresh`` random tokens are appended."""

    name: str
    base: list[int]
    fresh: int


class Finder:
    """Prompts of one window."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.model = Gemma4Oracle(CHECKPOINT, window)
        self.windowless = Gemma4Oracle(CHECKPOINT, 0)
        self.rng = np.random.default_rng(window)
        self.found: dict[str, dict] = {}

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(FIRST_TEXT, VOCAB, count).tolist()

    def judge(self, prompt: list[int]) -> dict | None:
        output, margin = self.model.greedy(np.array(prompt), STEPS)
        if margin <= MARGIN or STOPS & set(output) or len(set(output)) < 8:
            return None
        if len(prompt) > self.window and self.windowless.greedy(np.array(prompt), STEPS)[0] == output:
            return None
        return {"prompt": prompt, "output": output, "min_margin": round(margin, 6)}

    def find(self, wish: Wish) -> list[int]:
        for _ in range(200):
            entry = self.judge(wish.base + self.tokens(wish.fresh))
            if entry is not None:
                self.found[wish.name] = {"name": wish.name, **entry}
                return entry["prompt"]
        raise RuntimeError(f"window {self.window}: no prompt for {wish.name}")

    def root(self) -> list[int]:
        """A common prefix of 512 tokens whose 384- and 512-token cuts are themselves good prompts."""
        for _ in range(200):
            root = [BOS, *self.tokens(511)]
            cuts = {"pages_384": self.judge(root[:384]), "pages_512": self.judge(root)}
            if all(cuts.values()):
                self.found |= {name: {"name": name, **entry} for name, entry in cuts.items()}
                return root
        raise RuntimeError(f"window {self.window}: no root")

    def run(self) -> list[dict]:
        w, root = self.window, self.root()
        for name, length in (
            ("short", 12),
            ("window_minus_1", w - 1),
            ("window", w),
            ("window_plus_1", w + 1),
            ("three_windows", 3 * w + 5),
            ("page_128", 128),
            ("page_256", 256),
            ("past_page_128", 129),
            ("long", 700),
        ):
            self.find(Wish(name, [BOS], length - 1))
        shared = self.find(Wish("shared_a", root[:300], 40))
        self.find(Wish("shared_b", root[:300], 41))
        self.find(Wish("shared_256", root[:256], 30))
        self.find(Wish("diverge_in_window", shared[:-20], 20))  # 20 < every window
        self.find(Wish("continuation", shared + self.found["shared_a"]["output"][:16], 10))
        return list(self.found.values())


def main() -> None:
    prompts = {str(window): Finder(window).run() for window in WINDOWS}
    data = {"checkpoint": "refs/gemma4-tiny", "steps": STEPS, "margin": MARGIN, "windows": prompts}
    lines = json.dumps(data, separators=(",", ":")).replace('{"name"', '\n{"name"')
    OUT.write_text(lines + "\n", encoding="utf-8")
    for window, entries in prompts.items():
        print(window, [(e["name"], len(e["prompt"]), e["min_margin"]) for e in entries])


if __name__ == "__main__":
    main()
