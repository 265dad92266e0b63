"""From flags, model and device to pool sizes: the memory a rank may spend on KV, then :mod:`mem_cache.sizing`.

=============================  ========================================================================================
given                          KV bytes of one rank (over its tensor axis)
=============================  ========================================================================================
``--max-total-tokens``         what those tokens take; refused when it exceeds the bound of the next rows
``--mem-fraction-static f``    f x device memory - weights, x tensor axis; on CPU: f x host memory - weights, / ranks
nothing, TPU / GPU             as above with f = 0.88 (the rest is for activations)
nothing, CPU                   256 MiB over all ranks, or one sequence at context length if that is more, but at most a quarter of
                               the free host memory
=============================  ========================================================================================
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

from sgl_jax.srt.configs.layer_spec import LayerKind
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.mem_cache.sizing import (
    DEFAULT_SWA_RATIO,
    MEMORY_FLAG,
    TOTAL_FLAG,
    CapRules,
    PoolConfigError,
    PoolDemand,
    PoolPlan,
    plan_pools,
)
from sgl_jax.srt.server_args import ServerArgs, ServerArgsError

DEFAULT_DEVICE_FRACTION = 0.88
CPU_DEFAULT_BYTES = 256 << 20
INTERVAL_ENV = "SGL_JAX_SWA_EVICTION_INTERVAL_MULTIPLIER"
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device (TPU, GPU) or of the host, which all virtual devices share (CPU). Bytes.

    ``total`` None: the device does not tell. ``available`` matters on CPU only.
    """

    platform: str
    total: int | None
    available: int | None = None

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"


@dataclass(frozen=True, slots=True)
class KVBudget:
    """KV bytes of one rank, None = unbounded, and where the number came from."""

    rank_bytes: int | None
    source: str


def measure_device_memory(device: str = "auto") -> DeviceMemory:
    """Memory of the first device of platform ``device``; initialises JAX."""
    from sgl_jax.srt.model_executor.mesh import pick_devices

    first = pick_devices(device)[0]
    if first.platform == "cpu":
        import psutil

        memory = psutil.virtual_memory()
        return DeviceMemory("cpu", memory.total, memory.available)
    stats = first.memory_stats() or {}
    return DeviceMemory(first.platform, stats.get("bytes_limit"))


def weight_bytes(config: ModelConfig, tp_size: int, dp_size: int) -> int:
    """Bytes of weights on one device; from the abstract model, nothing is allocated."""
    from flax import nnx
    from jax import tree
    from jax.sharding import AbstractMesh

    from sgl_jax.srt.models.registry import build_model

    mesh = AbstractMesh((dp_size, tp_size // dp_size), ("data", "tensor"))
    model = build_model(config, mesh)
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in tree.leaves(nnx.state(model, nnx.Param))
    )


def interval_multiplier() -> float:
    """Reclaim interval in windows, from the environment; 1 unless set. Raises ServerArgsError for anything but a number > 0."""
    text = os.environ.get(INTERVAL_ENV, "").strip() or "1"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ServerArgsError(
            INTERVAL_ENV, f"= {text}", "must be a number above 0", "Unset it, or set it to 1.0"
        )
    return value


def cap_rules(server_args: ServerArgs, config: ModelConfig) -> CapRules:
    """Constants of the per-request caps; the scheduler's admission must use the same ones."""
    chunk = server_args.chunked_prefill_size
    hybrid = config.is_hybrid_swa and not server_args.disable_hybrid_swa_memory
    return CapRules(
        page_size=server_args.page_size,
        window=config.sliding_window if hybrid else None,
        chunk_size=chunk if chunk > 0 else None,
        interval_multiplier=interval_multiplier(),
        chunks_in_flight=1 if server_args.disable_overlap_schedule else 2,
    )


def pool_demand(server_args: ServerArgs, config: ModelConfig) -> PoolDemand:
    """Bytes per token of both layer kinds over the tensor axis, replicas counted (DECISIONS 11), with the cap rules.

    Raises ModelConfigError when heads or MLP do not divide over the tensor axis: also a plan of such a server is refused.
    """
    tensor = server_args.tp_size // server_args.dp_size
    config.check_tensor_parallel(tensor)
    itemsize = _ITEMSIZE[config.dtype]

    def bytes_of(kind: LayerKind) -> int:
        layers = config.layer_pattern.count(kind)
        return layers * config.spec(kind).kv_bytes_per_token(tensor, itemsize) if layers else 0

    rules = cap_rules(server_args, config)
    full, swa = bytes_of(LayerKind.FULL), bytes_of(LayerKind.SWA)
    if rules.window is None:  # one pool for all layers
        full, swa = full + swa, 0
    return PoolDemand(full, swa, server_args.dp_size, config.context_len, rules)


def kv_budget(
    server_args: ServerArgs, config: ModelConfig, demand: PoolDemand, memory: DeviceMemory
) -> KVBudget:
    """KV bytes one rank may take; see the table at the top of the module.

    Raises:
        PoolConfigError: the device does not tell its memory, or the weights leave nothing.
    """
    fraction = server_args.mem_fraction_static
    if memory.on_cpu and fraction is None:
        return _cpu_default(server_args, demand, memory)
    if memory.total is None:
        if server_args.max_total_tokens is not None:
            return KVBudget(
                None, f"{memory.platform} does not report its memory: {TOTAL_FLAG} is not checked"
            )
        raise PoolConfigError(
            MEMORY_FLAG, fraction, f"{memory.platform} does not report its memory size", f"use {TOTAL_FLAG}"
        )
    share = DEFAULT_DEVICE_FRACTION if fraction is None else fraction
    weights = weight_bytes(config, server_args.tp_size, server_args.dp_size)
    tensor = server_args.tp_size // server_args.dp_size
    if memory.on_cpu:
        rank = (int(share * memory.total) - weights * server_args.tp_size) // server_args.dp_size
    else:
        rank = (int(share * memory.total) - weights) * tensor
    what = "host memory" if memory.on_cpu else f"{memory.platform} memory per device"
    by = "by default" if fraction is None else f"from {MEMORY_FLAG}"
    source = f"KV memory: {share:g} ({by}) of {_bytes(memory.total)} {what}, less {_bytes(weights)} of weights per device"
    if rank <= 0:
        raise PoolConfigError(
            MEMORY_FLAG,
            f"{share:g}",
            f"leaves no memory for KV ({source})",
            "raise it, or use more devices (--tp-size)",
        )
    return KVBudget(rank, source)


def _cpu_default(server_args: ServerArgs, demand: PoolDemand, memory: DeviceMemory) -> KVBudget:
    available = memory.available if memory.available is not None else memory.total
    if available is None:
        return KVBudget(
            CPU_DEFAULT_BYTES // demand.dp_size, f"KV memory: {_bytes(CPU_DEFAULT_BYTES)} by default on CPU"
        )
    if server_args.max_total_tokens is not None:
        return KVBudget(available // demand.dp_size, f"bounded by {_bytes(available)} of free host memory")
    per_token = demand.full_token_bytes + DEFAULT_SWA_RATIO * demand.swa_token_bytes
    one_sequence = int((demand.context_len + 4 * demand.rules.page_size) * per_token)
    wanted = max(CPU_DEFAULT_BYTES // demand.dp_size, one_sequence)
    rank = min(wanted, available // 4 // demand.dp_size)
    return KVBudget(
        rank,
        f"KV memory: {_bytes(rank)} per rank by default on CPU (256 MiB over all ranks or one sequence at context length, at most "
        f"a quarter of {_bytes(available)} free); set {TOTAL_FLAG} or {MEMORY_FLAG} for more",
    )


def make_plan(
    server_args: ServerArgs, model_config: ModelConfig, device_memory: DeviceMemory | None = None
) -> PoolPlan:
    """Pool sizes of a server. Pure when ``device_memory`` is given; else the device of ``--device`` is measured.

    Raises:
        PoolConfigError: pools that could never admit a request, with the minimum (D72), or that exceed the memory.
    """
    memory = device_memory or measure_device_memory(server_args.device)
    demand = pool_demand(server_args, model_config)
    budget = kv_budget(server_args, model_config, demand, memory)
    given = server_args.provenance["swa_full_tokens_ratio"] in ("user", "environment")
    plan = plan_pools(
        demand,
        ratio=server_args.swa_full_tokens_ratio if given else None,
        max_total_tokens=server_args.max_total_tokens,
        memory_bytes=budget.rank_bytes,
        memory_fraction=server_args.mem_fraction_static,
    )
    return replace(plan, sources=(*plan.sources, budget.source))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def plan_text(plan: PoolPlan) -> str:
    """The plan for people: bytes -> tokens per pool and rank, concurrency, and where each number came from."""
    demand, rules = plan.demand, plan.demand.rules
    ranks = "1 rank" if plan.dp_size == 1 else f"{plan.dp_size} ranks"
    lines = [f"KV plan: page size {rules.page_size}, {ranks}, {_bytes(plan.rank_bytes)} per rank"]
    pools = [("FULL", demand.full_token_bytes, plan.full_tokens, plan.full_pages, plan.full_bytes)]
    if demand.hybrid:
        pools.append(("SWA", demand.swa_token_bytes, plan.swa_tokens, plan.swa_pages, plan.swa_bytes))
    for name, per_token, tokens, pages, total in pools:
        lines.append(
            f"  {name:<4}  {_bytes(total):>10} / {_bytes(per_token)} per token -> {tokens:,} tokens per rank "
            f"({pages:,} pages + 1 for padding)"
        )
    if demand.hybrid:
        lines.append(
            f"  window {rules.window}: a decoding request holds at most {rules.decode_peak:,} SWA tokens"
        )
    lines.append(
        f"  largest request {plan.largest_request:,} tokens (context length {demand.context_len:,}); "
        f"{plan.concurrency:.1f} of them at once per rank"
    )
    lines += [f"  - {source}" for source in plan.sources]
    return "\n".join(lines)
