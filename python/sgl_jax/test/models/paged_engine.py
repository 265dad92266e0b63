"""A scheduler-free engine for parity tests: sequences, shuffled pages in two pools, window pages given back as decode moves on.

Pools start as NaN and pages given back are not reused, so any read outside the window or the live pages shows in the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.layers.attention.backend import LayerKV
from sgl_jax.srt.layers.attention.metadata import (
    AttentionShape,
    build_attention_metadata,
    check_queries,
    query_block_rows,
)
from sgl_jax.srt.mem_cache.window import first_visible
from sgl_jax.srt.models.inputs import ModelInputs
from sgl_jax.srt.models.registry import load_model
from sgl_jax.test.layers.attention.paged_cases import Queries

REFS = Path(__file__).parents[1] / "fixtures" / "refs"
FAMILIES = ("gemma4", "gemma3", "llama", "qwen3")


def expected(family: str) -> dict[str, np.ndarray]:
    with np.load(REFS / f"{family}-tiny" / "expected.npz") as data:
        return dict(data)


@dataclass
class Sequence:
    """Tokens in KV so far and the pages of both pools, logical order; ``swa_first`` = first window page still held."""

    rank: int = 0
    length: int = 0
    full: list[int] = field(default_factory=list)
    swa: list[int] = field(default_factory=list)
    swa_first: int = 0


class PagedEngine:
    """Runs steps of ``(sequence, new token ids)`` over a ``(dp, tp)`` mesh. ``pages_per_rank`` bounds each pool."""

    def __init__(
        self,
        config: ModelConfig,
        page: int,
        tokens: int = 320,
        seqs: int = 4,
        max_len: int = 512,
        dp: int = 1,
        tp: int = 1,
    ) -> None:
        self.config, self.page, self.tokens, self.seqs, self.dp = config, page, tokens, seqs, dp
        self.max_len = max_len
        devices = np.array(jax.devices()[: dp * tp], dtype=object).reshape(dp, tp)
        self.mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        model = load_model(config, self.mesh)
        graph, self.weights = nnx.split(model)

        @partial(jax.jit, donate_argnums=(2,))
        def step(weights, inputs, kv):
            return nnx.merge(graph, weights)(inputs, kv)

        self._step = step
        self.reset(pages_per_rank=seqs * (max_len // page + 1))

    def reset(self, pages_per_rank: int) -> None:
        """Empty pools, fresh page ids."""
        self.pages_per_rank = pages_per_rank
        rng = np.random.default_rng(7)
        order = lambda: rng.permutation(np.arange(1, pages_per_rank + 1)).tolist()  # noqa: E731
        self._free = [{"full": order(), "swa": order()} for _ in range(self.dp)]
        layout = NamedSharding(self.mesh, P("data", None, "tensor"))
        shape = (self.dp * (pages_per_rank + 1), self.page)
        pools = []
        for i in range(self.config.num_hidden_layers):
            spec = self.config.layer_spec(i)
            heads = spec.kv_heads_stored(self.mesh.shape["tensor"])
            k, v = (
                jax.device_put(jnp.full((*shape, heads * dim), jnp.nan, self.config.dtype), layout)
                for dim in (spec.head_dim, spec.v_head_dim)
            )
            pools.append(LayerKV(k, v))
        self.kv = tuple(pools)

    def run(self, work: list[tuple[Sequence, np.ndarray]], all_logits: bool = True) -> list[np.ndarray]:
        """One step. Returns logits per entry, [n, vocab] (or [1, vocab] of its last token)."""
        by_rank: list[list[tuple[Sequence, np.ndarray]]] = [[] for _ in range(self.dp)]
        for seq, ids in work:
            by_rank[seq.rank].append((seq, np.asarray(ids)))
        decode = all(len(ids) == 1 for _, ids in work)
        tokens = self.seqs if decode else self.tokens
        ranks = [self._queries(entries) for entries in by_rank]
        for rank in ranks:
            limit = self.pages_per_rank
            check_queries(rank, self.page, self.config.sliding_window, limit, limit)
        per_seq = -(-self.max_len // self.page)
        shape = AttentionShape(
            tokens,
            self.seqs,
            1 if decode else query_block_rows(tokens, 32),
            self.seqs * per_seq,
            self.seqs * per_seq if self.config.is_hybrid_swa else 0,
        )
        inputs = ModelInputs(
            self._stack([[ids for _, ids in e] for e in by_rank], tokens),
            self._stack([[np.arange(s.length - len(i), s.length) for s, i in e] for e in by_rank], tokens),
            np.tile(np.arange(tokens, dtype=np.int32), (self.dp, 1)),
            build_attention_metadata(ranks, shape),
        )
        logits, self.kv = self._step(self.weights, inputs, self.kv)
        host = np.asarray(logits)
        out, at = [], [0] * self.dp
        for seq, ids in work:
            rows = host[seq.rank, at[seq.rank] : at[seq.rank] + len(ids)]
            at[seq.rank] += len(ids)
            out.append(rows if all_logits else rows[-1:])
        return out

    def prefill(self, seqs: list[Sequence], prompts: np.ndarray, chunk: int) -> np.ndarray:
        """All prompts side by side, ``chunk`` tokens a step each -> logits [B, T, vocab]."""
        parts = []
        for start in range(0, prompts.shape[1], chunk):
            parts.append(np.stack(self.run([(s, p[start : start + chunk]) for s, p in zip(seqs, prompts)])))
        return np.concatenate(parts, axis=1)

    def greedy(self, seqs: list[Sequence], prompts: np.ndarray, steps: int, chunk: int) -> np.ndarray:
        """Greedy continuation of every prompt -> tokens [B, steps]."""
        last = self.prefill(seqs, prompts, chunk)[:, -1]
        tokens = [last.argmax(-1)]
        for _ in range(steps - 1):
            rows = self.run([(s, t[None]) for s, t in zip(seqs, tokens[-1])])
            tokens.append(np.concatenate(rows).argmax(-1))
        return np.stack(tokens, axis=1)

    def _queries(self, entries: list[tuple[Sequence, np.ndarray]]) -> Queries:
        """Allocate for the new tokens, give back window pages nobody sees, and describe the step."""
        full_loc, swa_loc, extend = [], [], []
        for seq, ids in entries:
            start, end = seq.length, seq.length + len(ids)
            free = self._free[seq.rank]
            for name, held, first in (("full", seq.full, 0), ("swa", seq.swa, seq.swa_first)):
                held += [free[name].pop() for _ in range(-(-end // self.page) - first - len(held))]
            seq.length = end
            position = np.arange(start, end)
            if self.config.is_hybrid_swa:
                low = first_visible(start, self.config.sliding_window) // self.page
                del seq.swa[: low - seq.swa_first]
                seq.swa_first = low
            full_loc.append(self._slots(np.array(seq.full), position, 0))
            swa_loc.append(self._slots(np.array(seq.swa), position, seq.swa_first))
            extend.append(len(ids))
        seqs = [seq for seq, _ in entries]
        flat = lambda parts: np.array([x for part in parts for x in part], np.int32)  # noqa: E731
        starts = lambda parts: np.cumsum([0] + [len(p) for p in parts]).astype(np.int32)  # noqa: E731
        hybrid = self.config.is_hybrid_swa
        return Queries(
            np.array(extend, np.int32),
            np.array([s.length for s in seqs], np.int32),
            flat(full_loc),
            flat([s.full for s in seqs]),
            starts([s.full for s in seqs]),
            flat(swa_loc) if hybrid else None,
            flat([s.swa for s in seqs]) if hybrid else None,
            starts([s.swa for s in seqs]) if hybrid else None,
            np.array([s.swa_first for s in seqs], np.int32) if hybrid else None,
        )

    def _slots(self, pages: np.ndarray, position: np.ndarray, first: int) -> np.ndarray:
        return pages[position // self.page - first] * self.page + position % self.page

    def _stack(self, ranks: list[list[np.ndarray]], width: int) -> np.ndarray:
        out = np.zeros((self.dp, width), np.int32)
        for row, parts in zip(out, ranks):
            flat = np.concatenate([*parts, np.empty(0, np.int64)])
            row[: len(flat)] = flat
        return out
