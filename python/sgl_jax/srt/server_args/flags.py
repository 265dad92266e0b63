"""The flag table: one row per server argument. Parsing, checking, help and the docs all read it.

Spellings and defaults follow SGLang and sglang-jax; every row is a field of :class:`ServerArgs` with the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GROUPS = (
    "model",
    "http server",
    "parallelism and devices",
    "memory pools",
    "prefix cache",
    "scheduling",
    "kernels and compilation",
    "logging and metrics",
    "features of later releases (refused at start when used)",
)
MODEL, HTTP, PARALLEL, MEMORY, CACHE, SCHEDULE, KERNELS, LOGGING, LATER = GROUPS


@dataclass(frozen=True, slots=True)
class Flag:
    """One server argument.

    ``kind``: str, int, size (an int that may be typed ``100k``), float, bool (a switch) or ints (a list).
    ``low``/``high`` bound the value inclusively; ``low_open`` excludes ``low`` itself. ``special`` values pass the bounds.
    ``default`` None means "resolved later", and ``derived_from`` says from what.
    """

    name: str
    spellings: tuple[str, ...]
    kind: str
    default: Any
    group: str
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    special: tuple[Any, ...] = ()
    derived_from: str = ""

    @property
    def flag(self) -> str:
        """The spelling that messages use."""
        return self.spellings[0]


def _row(name: str, kind: str, default: Any, group: str, help_: str, *aliases: str, **extra: Any) -> Flag:
    return Flag(name, ("--" + name.replace("_", "-"), *aliases), kind, default, group, help_, **extra)


UNIFIED_SPELLINGS = ("--enable-unified-radix-cache", "--enable-unified-radix-tree")
UNIFIED_ENV = "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE"

# fmt: off
FLAGS: tuple[Flag, ...] = (
    _row("model_path", "str", None, MODEL, "local folder with config.json, *.safetensors and the tokenizer (required)", "--model"),
    _row("tokenizer_path", "str", None, MODEL, "folder of the tokenizer", derived_from="--model-path"),
    _row("served_model_name", "str", None, MODEL, "model name in the API", derived_from="--model-path"),
    _row("trust_remote_code", "bool", False, MODEL, "let the tokenizer folder run its own Python code"),
    _row("dtype", "str", "auto", MODEL, "type of weights and activations; auto takes it from config.json (float32 on CPU)",
         choices=("auto", "bfloat16", "float32")),
    _row("load_format", "str", "auto", MODEL, "auto: safetensors; dummy: random weights from --random-seed",
         choices=("auto", "dummy")),
    _row("context_length", "size", None, MODEL, "longest prompt plus output of one request", low=1,
         derived_from="config.json"),
    _row("chat_template", "str", None, MODEL, "file with a Jinja chat template that replaces the tokenizer's"),
    _row("skip_tokenizer_init", "bool", False, MODEL, "load no tokenizer: requests carry input_ids and get output_ids only"),

    _row("host", "str", "127.0.0.1", HTTP, "address to listen on"),
    _row("port", "int", 30000, HTTP, "port to listen on", low=1, high=65535),
    _row("api_key", "str", None, HTTP, "key that clients send as 'Authorization: Bearer KEY' (health and metrics exempt)"),
    _row("max_queued_requests", "size", None, HTTP, "requests that may wait; one more is answered 503 at once", low=0),
    _row("watchdog_timeout", "float", 300.0, HTTP, "seconds without a heartbeat of the scheduler loop until the server ends",
         low=0, low_open=True),
    _row("drain_timeout", "float", 60.0, HTTP, "seconds that SIGTERM leaves running requests to finish", low=0),
    _row("skip_server_warmup", "bool", False, HTTP, "become ready without a warm-up request"),

    _row("tp_size", "int", 1, PARALLEL, "JAX devices in all; the attention tensor axis is tp/dp",
         "--tensor-parallel-size", low=1),
    _row("dp_size", "int", 1, PARALLEL, "data-parallel attention ranks inside those devices, each with its own KV pools",
         "--data-parallel-size", low=1),
    _row("dp_schedule_policy", "str", None, PARALLEL, "how a request gets its rank",
         choices=("cache_aware", "min_running_queue", "round_robin"), derived_from="the radix cache: on cache_aware, off min_running_queue"),
    _row("device", "str", "auto", PARALLEL, "backend to run on", choices=("auto", "tpu", "gpu", "cpu")),
    _row("random_seed", "int", 42, PARALLEL, "seed of dummy weights and of unseeded sampling", low=0, high=2**32 - 1),

    _row("page_size", "int", 1, MEMORY, "tokens per KV page; recipes use 128 and 256", low=1),
    _row("mem_fraction_static", "float", None, MEMORY, "share of device memory for weights and KV pools", low=0, low_open=True,
         high=1, derived_from="device"),
    _row("max_total_tokens", "size", None, MEMORY, "FULL pool size in tokens, all ranks together", low=1,
         derived_from="device memory"),
    _row("swa_full_tokens_ratio", "float", 0.8, MEMORY, "SWA tokens / FULL tokens per layer", low=0, low_open=True, high=1),
    _row("disable_hybrid_swa_memory", "bool", False, MEMORY, "one pool for all layers of a hybrid model"),

    _row("disable_radix_cache", "bool", False, CACHE, "no prefix reuse (chunk cache); wins over the unified flag"),
    Flag("enable_unified_radix_tree", UNIFIED_SPELLINGS, "bool", False, CACHE,
         "UnifiedRadixCache for hybrid models; leaving it out is the rollback"),
    _row("enable_cache_report", "bool", False, CACHE,
         "usage.prompt_tokens_details.cached_tokens, and the internal ledger endpoint"),
    _row("debug_cache", "bool", False, CACHE, "strict allocators and full ownership checks (slow; for development)"),

    _row("chunked_prefill_size", "size", 4096, SCHEDULE, "longest prefill step in tokens, a multiple of --page-size; -1 disables",
         low=1, special=(-1,)),
    _row("max_prefill_tokens", "size", 16384, SCHEDULE, "prompt tokens of one prefill batch, per rank", low=1),
    _row("max_running_requests", "size", None, SCHEDULE, "requests that decode together, all ranks", low=1,
         derived_from="the device: 64 on CPU, else 256"),
    _row("schedule_policy", "str", "fcfs", SCHEDULE, "order of the waiting queue", choices=("fcfs", "lpm", "random")),
    _row("schedule_conservativeness", "float", 1.0, SCHEDULE, "above 1 admits less and retracts less", low=0, low_open=True),
    _row("disable_overlap_schedule", "bool", False, SCHEDULE, "do not prepare step n+1 while the device runs step n"),

    _row("attention_backend", "str", "native", KERNELS, "native: plain JAX on every device", choices=("native", "fa")),
    _row("moe_backend", "str", "auto", KERNELS, "MoE kernel choice"),
    _row("precompile_token_paddings", "ints", None, KERNELS, "token counts to compile prefill for", low=1,
         derived_from="--chunked-prefill-size"),
    _row("precompile_bs_paddings", "ints", None, KERNELS, "batch sizes to compile decode for", low=1,
         derived_from="--max-running-requests"),
    _row("disable_precompile", "bool", False, KERNELS, "compile shapes when they are first needed"),

    _row("log_level", "str", "info", LOGGING, "least severe level that is logged",
         choices=("debug", "info", "warning", "error")),
    _row("log_requests", "bool", False, LOGGING, "log every request when it arrives and when it ends (lengths, not texts)"),
    _row("decode_log_interval", "int", 40, LOGGING, "decode steps between two log lines", low=1),
    _row("enable_metrics", "bool", False, LOGGING, "serve Prometheus metrics at /metrics"),

    _row("ep_size", "int", 1, LATER, "MoE expert parallel size", "--expert-parallel-size", low=1),
    _row("nnodes", "int", 1, LATER, "number of hosts", low=1),
    _row("node_rank", "int", 0, LATER, "rank of this host", low=0),
    _row("dist_init_addr", "str", None, LATER, "host:port of the first host"),
    _row("dist_timeout", "int", None, LATER, "seconds to wait for the other hosts", low=1),
    _row("hicache_storage", "str", "disable", LATER, "host-memory tier of the prefix cache"),
    _row("hicache_ratio", "float", 2.0, LATER, "host pool size / device pool size", low=0, low_open=True),
    _row("hicache_write_through_threshold", "int", 1, LATER, "hits before a node is written to the host", low=1),
    _row("hicache_write_policy", "str", "write_through", LATER, "when nodes are written to the host",
         choices=("write_through", "write_through_selective", "write_back")),
    _row("enable_recurrent_extra_buffer", "bool", False, LATER, "double buffer of recurrent states"),
    _row("recurrent_track_interval", "int", None, LATER, "tokens between two kept recurrent states", low=1),
    _row("speculative_algorithm", "str", None, LATER, "speculative decoding"),
    _row("pd_disaggregation", "str", "", LATER, "separate prefill and decode servers"),
    _row("disaggregation_mode", "str", "null", LATER, "role of this server under disaggregation"),
)
# fmt: on

BY_NAME: dict[str, Flag] = {flag.name: flag for flag in FLAGS}
