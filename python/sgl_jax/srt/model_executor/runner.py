"""Compiled steps: one forward pass per padded shape, one sampler per row count and variant.

::

    forward(params, kv pools (donated), packed batch, previous tokens) -> kv pools, logits at the rows' last tokens [, prompt logprobs]
    sample (logits, packed sampling parameters, previous tokens)       -> tokens [, logprobs], previous tokens of the next step

The two are separate so that the expensive forward pass is compiled once per shape, whatever the sampling. Sampled tokens stay
on the device: a row whose input is "what row r of the step before sampled" (``future_rows``) is resolved there, so the
host launches step n+1 before it knows the result of step n. Both run the same code with overlap on and off.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sgl_jax.srt.layers.attention.backend import LayerKV
from sgl_jax.srt.model_executor import sampler
from sgl_jax.srt.model_executor.forward_inputs import RankInputs, RankResult, StepInputs, StepResult
from sgl_jax.srt.model_executor.mesh import DATA_AXIS
from sgl_jax.srt.model_executor.model_functions import ModelFunctions
from sgl_jax.srt.model_executor.packing import PackSpec, pack, unpack
from sgl_jax.srt.model_executor.padding import (
    ForwardArrays,
    PaddingTable,
    PageGeometry,
    StepShape,
    attention_shape,
    empty_step,
    pad_step,
)
from sgl_jax.srt.model_executor.sampling_batch import SampleVariant, choose_variant, pad_sampling
from sgl_jax.srt.models.inputs import ModelInputs

logger = logging.getLogger(__name__)

_PROMPT_LOGITS_BYTES = 32 << 20  # float32 logits held at once while prompt logprobs are computed


class KVBuffers(Protocol):
    """The pool as a step sees it: (K, V) per layer in layer order, donated and replaced."""

    def buffers(self) -> list[tuple[Any, Any]]: ...

    def replace_buffer(self, kv_buffer: Sequence[Any]) -> None: ...


class PromptLogprobs(NamedTuple):
    """Raw logprobs of the targets [dp, T]; alternatives [dp, T, k] or None."""

    logprobs: jax.Array
    top_values: jax.Array | None
    top_ids: jax.Array | None


class StepOutputs(NamedTuple):
    """Device arrays of a launched step that the host will want."""

    sample: sampler.SampleOutput
    prompt: PromptLogprobs | None


class LaunchedStep:
    """Handle of a launched step: fetches its outputs once, on the first ``result()``."""

    __slots__ = ("_outputs", "_result", "_step")

    def __init__(self, step: StepInputs, outputs: StepOutputs) -> None:
        self._step = step
        self._outputs: StepOutputs | None = outputs
        self._result: StepResult | None = None
        for leaf in jax.tree.leaves(outputs):
            leaf.copy_to_host_async()

    def result(self) -> StepResult:
        """Blocks until the device is done. Idempotent: the same object every time."""
        if self._result is None:
            assert self._outputs is not None
            host: StepOutputs = jax.device_get(self._outputs)
            step = self._step
            ranks = (_rank_result(host, i, rank, step.top_logprobs) for i, rank in enumerate(step.ranks))
            self._result = StepResult(tuple(ranks))
            self._outputs = None
        return self._result


def _rank_result(host: StepOutputs, index: int, rank: RankInputs, top: int) -> RankResult:
    rows, tokens = rank.batch_size, len(rank.input_ids)

    def cut(array: Any, length: int) -> Any:
        if array is None:
            return None
        return array[index, :length, :top] if array.ndim == 3 else array[index, :length]

    sample = host.sample
    prompt = host.prompt if rank.logprob_targets is not None else None
    return RankResult(
        next_token_ids=cut(sample.tokens, rows),
        logprobs=cut(sample.logprobs, rows),
        top_values=cut(sample.top_values, rows),
        top_ids=cut(sample.top_ids, rows),
        input_logprobs=None if prompt is None else cut(prompt.logprobs, tokens),
        input_top_values=None if prompt is None else cut(prompt.top_values, tokens),
        input_top_ids=None if prompt is None else cut(prompt.top_ids, tokens),
    )


class ModelRunner:
    """Pads, launches and compiles steps of one model over the arrays of ``pool``.

    A launch donates the pool's arrays to the step and gives the pool the new ones. Not thread-safe.
    """

    def __init__(
        self,
        functions: ModelFunctions,
        params: Any,
        pool: KVBuffers,
        mesh: Mesh,
        table: PaddingTable,
        geometry: PageGeometry,
    ) -> None:
        self.vocab_size = functions.vocab_size
        self.params = params
        self.pool = pool
        self.mesh = mesh
        self.table = table
        self.geometry = geometry
        self._by_rank = NamedSharding(mesh, P(DATA_AXIS, None))
        self._dp_size = mesh.shape[DATA_AXIS]
        self._previous = jax.device_put(np.zeros((self._dp_size, table.max_batch), np.int32), self._by_rank)
        # Outputs that are the next step's inputs keep their exact sharding: another spelling of it would compile again.
        self._forward = jax.jit(
            functools.partial(_forward, functions, mesh),
            static_argnames=("spec", "top"),
            donate_argnums=(1,),
            out_shardings=(jax.tree.map(lambda x: x.sharding, pool.buffers()), None, None),
        )
        self._sample = jax.jit(
            functools.partial(_sample, table.max_batch),
            static_argnames=("spec", "variant"),
            out_shardings=(None, self._by_rank),
        )
        self._compiled: set[Any] = set()

    def launch(self, step: StepInputs) -> LaunchedStep:
        """Pad and launch ``step``; returns at once.

        Raises:
            StepTooLargeError: the step exceeds the worker's limits. Nothing has been launched then.
        """
        tokens = max(len(r.input_ids) for r in step.ranks)
        rows = max(r.batch_size for r in step.ranks)
        shape = self.table.select(step.mode, tokens, rows)
        return self._run(step, shape, warm=False)

    def warm_up(self, shape: StepShape, variants: Sequence[SampleVariant]) -> None:
        """Compile ``shape`` with each of ``variants`` by running an empty step: it writes only to page 0. Blocks."""
        for variant in variants:
            self._run(
                empty_step(shape.mode, self._dp_size, self.geometry.swa_pages_per_rank > 0),
                shape,
                warm=True,
                variant=variant,
            ).result()

    def _run(
        self, step: StepInputs, shape: StepShape, *, warm: bool, variant: SampleVariant | None = None
    ) -> LaunchedStep:
        began = time.perf_counter()
        variant = variant or choose_variant(step, self.vocab_size)
        arrays = pad_step(step, shape, attention_shape(shape, self.geometry, step.ranks))
        batch, batch_spec = pack(arrays)
        params, params_spec = pack(pad_sampling(step, shape.seqs))
        top = variant.top_logprobs if arrays.logprob_targets is not None else 0
        new = {("forward", batch_spec, top), ("sample", params_spec, variant)} - self._compiled
        batch, params = jax.device_put((batch, params), self._by_rank)
        buffers, logits, prompt = self._forward(
            self.params, self.pool.buffers(), batch, self._previous, spec=batch_spec, top=top
        )
        self.pool.replace_buffer(buffers)
        sample, self._previous = self._sample(
            logits, params, self._previous, spec=params_spec, variant=variant
        )
        if new:
            self._compiled |= new
            if not warm:
                logger.info(
                    "compiled at run time: %s, %s (%.1f s)", shape, variant, time.perf_counter() - began
                )
        return LaunchedStep(step, StepOutputs(sample, prompt))


def _forward(
    functions: ModelFunctions,
    mesh: Mesh,
    params: Any,
    kv: list[tuple[jax.Array, jax.Array]],
    buffer: jax.Array,
    previous: jax.Array,
    *,
    spec: PackSpec,
    top: int,
) -> tuple[list[tuple[jax.Array, ...]], jax.Array, PromptLogprobs | None]:
    batch: ForwardArrays = unpack(buffer, spec)
    sampled = jnp.take_along_axis(previous, jnp.maximum(batch.future_rows, 0), axis=1)
    input_ids = jnp.where(batch.future_rows >= 0, sampled, batch.input_ids)
    inputs = ModelInputs(input_ids, batch.positions, batch.out_rows, batch.attention)
    hidden, layers = functions.hidden(params, inputs, tuple(LayerKV(*pair) for pair in kv))
    last = jnp.take_along_axis(hidden, batch.out_rows[..., None], axis=1)
    logits = functions.logits(params, last)
    logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P(DATA_AXIS, None, None)))
    prompt = None
    if batch.logprob_targets is not None:
        prompt = _prompt_logprobs(functions, params, hidden, batch.logprob_targets, logits.shape[-1], top)
    return [tuple(layer) for layer in layers], logits, prompt


def _prompt_logprobs(
    functions: ModelFunctions, params: Any, hidden: jax.Array, targets: jax.Array, vocab: int, top: int
) -> PromptLogprobs:
    """Logprobs of ``targets`` [dp, T] in blocks of rows, so that ``[T, vocab]`` never exists."""
    ranks, tokens, width = hidden.shape
    rows = max(1, min(tokens, _PROMPT_LOGITS_BYTES // (4 * vocab * ranks)))
    blocks = -(-tokens // rows)
    pad = blocks * rows - tokens
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(ranks, blocks, rows, width)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(ranks, blocks, rows)

    def block(args: tuple[jax.Array, jax.Array]) -> PromptLogprobs:
        raw = functions.logits(params, args[0]).astype(jnp.float32)
        return PromptLogprobs(*sampler.gather_logprobs(raw, args[1], top))

    out = jax.lax.map(block, (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))

    def join(x: jax.Array) -> jax.Array:  # [blocks, ranks, rows, ...] -> [ranks, T, ...]
        return x.swapaxes(0, 1).reshape(ranks, blocks * rows, *x.shape[3:])[:, :tokens]

    joined: PromptLogprobs = jax.tree.map(join, out)
    return joined


def _sample(
    max_batch: int,
    logits: jax.Array,
    buffer: jax.Array,
    previous: jax.Array,
    *,
    spec: PackSpec,
    variant: SampleVariant,
) -> tuple[sampler.SampleOutput, jax.Array]:
    out = sampler.sample(
        logits,
        unpack(buffer, spec),
        previous,
        kind=variant.kind,
        logprobs=variant.logprobs,
        top_logprobs=variant.top_logprobs,
    )
    following = jnp.pad(out.tokens, ((0, 0), (0, max_batch - out.tokens.shape[1])))
    return out, following
