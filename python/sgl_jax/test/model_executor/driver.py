"""A few lines that drive a worker or runner as the scheduler does: page tables, chunks, decode, one step ahead."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.mem_cache.memory_pool import SWAKVPool
from sgl_jax.srt.mem_cache.window import first_visible
from sgl_jax.srt.model_executor.forward_inputs import (
    ForwardMode,
    RankInputs,
    SamplingInputs,
    StepInputs,
    empty_rank,
)


def make_pool(config, mesh, page, full_pages, swa_pages, fill=0.0):
    """The pools of a hybrid model with that many usable pages per rank, every slot set to ``fill``."""
    dp, tensor = mesh.shape["data"], mesh.shape["tensor"]
    pool = SWAKVPool(
        full_pages * page * dp,
        swa_pages * page * dp,
        page,
        config.swa_attention_layer_ids,
        config.full_attention_layer_ids,
        swa_head_num=config.swa.kv_heads_stored(tensor),
        swa_head_dim=config.swa.head_dim,
        mesh=mesh,
        dp_size=dp,
        dtype=config.dtype,
        head_num=config.full.kv_heads_stored(tensor),
        head_dim=config.full.head_dim,
    )
    if fill:
        pool.replace_buffer(jax.tree.map(lambda x: x + jnp.float32(fill), pool.buffers()))
    return pool


@dataclass
class Sequence:
    """One request: its tokens and the pages it owns in both pools."""

    tokens: list[int]
    prompt_len: int
    done: int = 0  # tokens whose K/V is written or launched
    full: list[int] = field(default_factory=list)
    swa: list[int] = field(default_factory=list)
    previous_row: int = -1  # row of the step launched last


class Driver:
    """Pages of one rank are handed out in a shuffled order, so that nothing depends on adjacency."""

    def __init__(self, launch, page, window, full_pages, swa_pages, dp_size=1, seed=0):
        self.launch, self.page, self.window, self.dp_size = launch, page, window, dp_size
        rng = np.random.default_rng(seed)
        self.free_full = [list(rng.permutation(full_pages) + 1) for _ in range(dp_size)]
        self.free_swa = [list(rng.permutation(swa_pages) + 1) for _ in range(dp_size)]

    def _grow(self, rank, seq, length):
        while len(seq.full) * self.page < length:
            seq.full.append(int(self.free_full[rank].pop()))
            seq.swa.append(int(self.free_swa[rank].pop()) if self.window else 0)

    def _rank(self, rank, work, sampling, targets):
        """``work``: [(sequence, number of new tokens, take the input from the step before)]."""
        if not work:
            return empty_rank(bool(self.window))
        ids, positions, future, full_loc, swa_loc = [], [], [], [], []
        full_pages, swa_pages, full_start, swa_start, first = [], [], [0], [0], []
        want = []
        for seq, count, from_device in work:
            end = seq.done + count
            self._grow(rank, seq, end)
            for pos in range(seq.done, end):
                ids.append(0 if from_device else seq.tokens[pos])
                future.append(seq.previous_row if from_device else -1)
                positions.append(pos)
                full_loc.append(seq.full[pos // self.page] * self.page + pos % self.page)
                swa_loc.append(seq.swa[pos // self.page] * self.page + pos % self.page)
                want.append(seq.tokens[pos + 1] if targets and pos + 1 < seq.prompt_len else -1)
            pages = -(-end // self.page)
            low = first_visible(seq.done, self.window) // self.page if self.window else 0
            full_pages += seq.full[:pages]
            swa_pages += seq.swa[low:pages]
            full_start.append(len(full_pages))
            swa_start.append(len(swa_pages))
            first.append(low)
        counts = [c for _, c, _ in work]

        def i32(values):
            return np.array(values, np.int32)

        swa = {}
        if self.window:
            swa = {
                "swa_loc": i32(swa_loc),
                "swa_pages": i32(swa_pages),
                "swa_page_start": i32(swa_start),
                "swa_first_page": i32(first),
            }
        return RankInputs(
            input_ids=i32(ids),
            positions=i32(positions),
            extend_lens=i32(counts),
            seq_lens=i32([s.done + c for s, c, _ in work]),
            full_loc=i32(full_loc),
            full_pages=i32(full_pages),
            full_page_start=i32(full_start),
            sampling=sampling(work) if sampling else greedy(len(work)),
            future_rows=i32(future) if any(f >= 0 for f in future) else None,
            logprob_targets=i32(want) if targets else None,
            **swa,
        )

    def step(self, mode, per_rank, sampling=None, targets=False, top=0, logprobs=False):
        inputs = tuple(
            self._rank(r, per_rank[r] if r < len(per_rank) else [], sampling, targets)
            for r in range(self.dp_size)
        )
        handle = self.launch(StepInputs(mode, inputs, return_logprobs=logprobs or targets, top_logprobs=top))
        for work in per_rank:
            for row, (seq, count, _) in enumerate(work):
                seq.done += count
                seq.previous_row = row
        return handle

    def generate(self, prompts_by_rank, new_tokens, chunk=None, overlap=False, sampling=None):
        """Greedy (or ``sampling``) generation of all prompts together; returns the new tokens per rank and prompt."""
        ranks = [[Sequence(list(p), len(p)) for p in prompts] for prompts in prompts_by_rank]
        longest = max(len(s.tokens) for seqs in ranks for s in seqs)
        chunk = chunk or longest
        handle = None
        for begin in range(0, longest, chunk):
            work = [[(s, min(chunk, s.prompt_len - begin), False) for s in seqs] for seqs in ranks]
            handle = self.step(ForwardMode.EXTEND, work, sampling)
        for _ in range(new_tokens - 1):
            if overlap:  # launch the next step before looking at this one's result
                following = self.step(
                    ForwardMode.DECODE, [[(s, 1, True) for s in q] for q in ranks], sampling
                )
                self._take(handle, ranks)
                handle = following
            else:
                self._take(handle, ranks)
                handle = self.step(ForwardMode.DECODE, [[(s, 1, False) for s in q] for q in ranks], sampling)
        self._take(handle, ranks)
        return [[s.tokens[s.prompt_len :] for s in seqs] for seqs in ranks]

    @staticmethod
    def _take(handle, ranks):
        for result, seqs in zip(handle.result().ranks, ranks):
            for token, seq in zip(result.next_token_ids, seqs):
                seq.tokens.append(int(token))


def greedy(rows):
    zeros = np.zeros(rows, np.float32)
    return SamplingInputs(
        temperature=zeros,
        top_p=zeros + np.float32(1),
        top_k=np.zeros(rows, np.int32),
        min_p=zeros,
        seed=np.zeros(rows, np.uint32),
    )
