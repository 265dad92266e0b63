"""The model worker: mesh, weights, pools and compiled steps of one server, behind the seam of ``forward_inputs``.

The worker without a model (scheduler tests, host benchmarks) is in :mod:`noop_worker`, which imports no JAX.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.layers.attention.metadata import check_queries
from sgl_jax.srt.mem_cache.page import ceil_page, floor_page
from sgl_jax.srt.mem_cache.sizing import PoolPlan
from sgl_jax.srt.model_executor.compile_cache import enable_compile_cache
from sgl_jax.srt.model_executor.forward_inputs import StepHandle, StepInputs
from sgl_jax.srt.model_executor.kv_pools import build_kv_pool
from sgl_jax.srt.model_executor.memory_budget import make_plan, plan_text
from sgl_jax.srt.model_executor.mesh import make_mesh, pick_devices, request_cpu_devices
from sgl_jax.srt.model_executor.model_functions import functional
from sgl_jax.srt.model_executor.padding import PaddingTable, PageGeometry, build_padding_table
from sgl_jax.srt.model_executor.precompile import precompile
from sgl_jax.srt.model_executor.runner import ModelRunner
from sgl_jax.srt.models.registry import load_model
from sgl_jax.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from sgl_jax.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

logger = logging.getLogger(__name__)

_RUNNING_ON_CPU = 64
_RUNNING_ON_DEVICE = 256


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Largest step per rank: sequences, and new tokens of an extend step."""

    max_batch: int
    max_extend_tokens: int


def resolve_model_config(server_args: ServerArgs) -> ModelConfig:
    """The checkpoint's configuration under ``--dtype`` and ``--context-length``; ``--dtype auto`` is float32 on CPU.

    Raises:
        ModelConfigError: naming what cannot be served. MeshError: ``--device`` names an absent platform.
    """
    dtype = server_args.dtype
    if dtype == "auto":
        request_cpu_devices(server_args.tp_size)
        if pick_devices(server_args.device)[0].platform == "cpu":
            dtype = "float32"
    return ModelConfig.from_path(
        server_args.model_path, {"dtype": dtype, "context_length": server_args.context_length}
    )


def step_limits(server_args: ServerArgs, config: ModelConfig, plan: PoolPlan, on_cpu: bool) -> StepLimits:
    """Limits from ``--max-running-requests`` (64 on CPU, else 256, by default) and ``--chunked-prefill-size`` (-1: context
    length). No step can write more tokens than the smaller pool of a rank holds."""
    running = server_args.max_running_requests or (_RUNNING_ON_CPU if on_cpu else _RUNNING_ON_DEVICE)
    chunk = server_args.chunked_prefill_size
    page = plan.page_size
    tokens = chunk if chunk > 0 else ceil_page(config.context_len, page)
    pools = [plan.full_tokens] + ([plan.swa_tokens] if plan.demand.hybrid else [])
    return StepLimits(-(-running // plan.dp_size), max(page, floor_page(min(tokens, *pools), page)))


def _padding_table(server_args: ServerArgs, limits: StepLimits, on_cpu: bool) -> PaddingTable:
    return build_padding_table(
        limits.max_batch,
        limits.max_extend_tokens,
        token_paddings=server_args.precompile_token_paddings,
        bs_paddings=server_args.precompile_bs_paddings,
        on_cpu=on_cpu,
    )


class ModelWorker:
    """Loads a model, builds its pools and runs its steps; see ``forward_inputs.Worker``.

    ``plan`` and ``mesh`` are made from the arguments unless given. Construction order: devices, plan (so that a bad flag stops the start
    before any weight is read), weights, pools, compiled steps.

    Raises:
        MeshError, PoolConfigError, ModelConfigError, WeightLoadError, ValueError: each names flag or file, value and remedy.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig | None = None,
        plan: PoolPlan | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.mesh = mesh or make_mesh(server_args.tp_size, server_args.dp_size, device=server_args.device)
        devices = list(self.mesh.devices.flat)
        on_cpu = devices[0].platform == "cpu"
        self.cache_dir = enable_compile_cache(devices)
        self.model_config = model_config or resolve_model_config(server_args)
        self.plan = plan or make_plan(server_args, self.model_config)
        limits = step_limits(server_args, self.model_config, self.plan, on_cpu)
        table = _padding_table(server_args, limits, on_cpu)
        logger.info("%s", plan_text(self.plan))
        began = time.perf_counter()
        model = load_model(
            self.model_config,
            self.mesh,
            server_args.attention_backend,
            server_args.load_format,
            server_args.random_seed,
        )
        functions, params = functional(model)
        logger.info("weights ready: %.1f s", time.perf_counter() - began)
        self._kv_pool = build_kv_pool(self.model_config, self.plan, self.mesh)
        self.runner = ModelRunner(functions, params, self._kv_pool, self.mesh, table, self._geometry())
        self._check_steps = server_args.debug_cache
        self.compile_seconds = 0.0
        if not server_args.disable_precompile:
            self.compile_seconds = precompile(self.runner)
            logger.info("precompiled %d shapes: %.1f s", len(table.shapes()), self.compile_seconds)

    def _geometry(self) -> PageGeometry:
        plan = self.plan
        return PageGeometry(
            plan.page_size,
            self.model_config.context_len,
            plan.full_pages,
            plan.swa_pages if plan.demand.hybrid else 0,
            plan.demand.rules.window or 0,
        )

    @property
    def kv_pool(self) -> Any:
        return self._kv_pool

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def max_batch(self) -> int:
        return self.runner.table.max_batch

    @property
    def max_extend_tokens(self) -> int:
        return self.runner.table.max_extend_tokens

    def check_allocator(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        """Compare every layer's array with what ``allocator`` can hand out; call once at start (D59).

        Raises:
            PoolSizeError: naming layer, array size and allocator size.
        """
        self._kv_pool.check_allocator(allocator)

    def launch(self, step: StepInputs) -> StepHandle:
        """Launch ``step``; returns before the device is done. Steps run in launch order.

        Raises:
            StepTooLargeError: beyond ``max_batch`` or ``max_extend_tokens``. ValueError: under ``--debug-cache``, a slot or page
                list that the step's queries must not use.
        """
        if self._check_steps:
            for rank in step.ranks:
                self._check(rank)
        return self.runner.launch(step)

    def _check(self, rank: Any) -> None:
        rules = self.plan.demand.rules
        check_queries(rank, rules.page_size, rules.window, self.plan.full_pages, self.plan.swa_pages)
