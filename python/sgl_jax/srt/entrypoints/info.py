"""What ``/get_server_info`` shows; also used by the engine."""

from __future__ import annotations

from typing import Any

from sgl_jax import __version__
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager


async def server_info(manager: TokenizerManager, status: str, timeout: float) -> dict[str, Any]:
    """Flat arguments, then the scheduler's resolved values, then ``arguments`` with provenance and ``internal_states``.

    Answers also while the scheduler is busy or starting: ``internal_states`` is then a list with one ``error``.
    """
    return {
        **manager.args.to_dict(),
        **manager.info,
        "arguments": _arguments(manager),
        "version": __version__,
        "status": status,
        "open_requests": manager.open_requests,
        "internal_states": await _internal_states(manager, timeout),
    }


_RESOLVED_LATE = {
    "context_length": ("context_len", "model", "config.json"),
    "max_total_tokens": ("max_total_num_tokens", "derived", "the memory plan"),
    "max_running_requests": ("max_running_requests", "derived", "the device's default"),
}


def _arguments(manager: TokenizerManager) -> dict[str, Any]:
    """Arguments with provenance; values that only model and device could give are filled in with their source.

    Where something else runs than the value says (``dtype`` auto; a chunk larger than a pool), ``effective`` is what runs. A
    memory share that nobody gave has the plan's own sentence as its note.
    """
    shown = manager.args.describe()
    for name, (key, source, note) in _RESOLVED_LATE.items():
        if shown[name]["value"] is None and manager.info.get(key) is not None:
            shown[name] = {"value": manager.info[key], "source": source, "note": note}
    for name, value in (manager.info.get("effective") or {}).items():
        if shown[name]["value"] != value:
            shown[name]["effective"] = value
    plan, share = manager.info.get("plan"), shown["mem_fraction_static"]
    if share["value"] is None and plan:
        share |= {"source": "derived", "note": plan[-1]}
    return shown


async def _internal_states(manager: TokenizerManager, timeout: float) -> list[Any]:
    try:
        reply = await manager.control("internal_state", timeout=timeout)
    except RequestError as error:
        return [{"error": error.message}]
    ranks = reply.data.get("ranks")
    if isinstance(ranks, list):
        shared = {k: v for k, v in reply.data.items() if k != "ranks"}
        return [{**shared, **rank} if isinstance(rank, dict) else rank for rank in ranks]
    return [reply.data]
