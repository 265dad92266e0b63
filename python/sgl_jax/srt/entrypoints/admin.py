"""Operator endpoints: information, flush, abort, pause, load, and the internal ledger."""

from __future__ import annotations

import math
from typing import Any

from fastapi import APIRouter, Request, Response

from sgl_jax.srt.entrypoints.health import status
from sgl_jax.srt.entrypoints.http_io import StrictModel, json_response, parse_body, refuse_unknown_fields
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()

_STATE_TIMEOUT = 5.0
MAX_FLUSH_WAIT = 600.0


def _manager(request: Request) -> TokenizerManager:
    manager: TokenizerManager = request.app.state.manager
    return manager


@router.get("/get_model_info")
@router.get("/model_info")
async def get_model_info(request: Request) -> Response:
    manager = _manager(request)
    info = manager.info
    return json_response(
        {
            "model_path": manager.args.model_path,
            "tokenizer_path": manager.args.tokenizer_path,
            "served_model_name": manager.args.served_model_name,
            "is_generation": True,
            "context_length": info.get("context_len"),
            "max_req_input_len": info.get("max_req_input_len"),
            "vocab_size": info.get("vocab_size"),
            "has_chat_template": bool(manager.tokenizer is not None and manager.tokenizer.chat_template),
        }
    )


@router.get("/get_server_info")
@router.get("/server_info")
async def get_server_info(request: Request) -> Response:
    """Arguments flat (as SGLang's tools read them) and with provenance, what the scheduler resolved, and its state now."""
    from sgl_jax.srt.entrypoints.info import server_info

    return json_response(await server_info(_manager(request), status(request), _STATE_TIMEOUT))


def wants_json(request: Request) -> bool:
    return request.query_params.get("format") == "json" or "application/json" in request.headers.get(
        "accept", ""
    )


def _timeout(text: str | None) -> float:
    """``?timeout=`` in seconds."""
    if text is None:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_FLUSH_WAIT:
        raise RequestError(
            f"timeout is {text!r}, must be a number in [0, {MAX_FLUSH_WAIT:g}] seconds", param="timeout"
        )
    return value


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(request: Request) -> Response:
    """Drops every cached prefix. 400 with what is pending while anything runs; ``?timeout=`` waits for idle; 500 after a leak."""
    reply = await _manager(request).flush_cache(_timeout(request.query_params.get("timeout")))
    code = 200 if reply.ok else 500 if reply.data.get("leaked") else 400
    if wants_json(request):
        return json_response({"success": reply.ok, **reply.data}, code)
    text = str(reply.data.get("message") or ("Cache flushed." if reply.ok else "Flush refused."))
    pending = reply.data.get("pending")
    if not reply.ok and pending:
        text += f"\npending: {'; '.join(map(str, pending))}"
    return Response(text + "\n", code, media_type="text/plain")


class AbortBody(StrictModel):
    rid: str | None = None
    abort_all: bool = False


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    """Idempotent: an unknown or finished rid answers 200 with ``found: false``."""
    body = await parse_body(request, AbortBody)
    refuse_unknown_fields(body, {"abort_message": None})
    if not body.abort_all and not body.rid:
        raise RequestError("rid is missing: give rid, or abort_all: true", param="rid")
    return json_response(await _manager(request).abort(body.rid or "", body.abort_all))


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    reply = await _manager(request).control("load")
    return json_response(reply.data.get("ranks", reply.data), 200 if reply.ok else 500)


class PauseBody(StrictModel):
    mode: str = "abort"


@router.post("/pause_generation")
async def pause_generation(request: Request) -> Response:
    body = await parse_body(request, PauseBody)
    refuse_unknown_fields(body, {})
    modes = ("abort", "retract", "in_place")
    if body.mode not in modes:
        raise RequestError(f"mode is {body.mode!r}, must be one of {', '.join(modes)}", param="mode")
    reply = await _manager(request).control("pause", {"mode": body.mode})
    return json_response({"success": reply.ok, **reply.data}, 200 if reply.ok else 400)


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    reply = await _manager(request).control("continue")
    return json_response({"success": reply.ok, **reply.data}, 200 if reply.ok else 400)


def _count(name: str, text: str, limit: str = "0 or more", below: float = math.inf) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= below:
        raise RequestError(f"{name} is {text!r}, must be an integer, {limit}", param=name)
    return int(text)


def _slot_question(request: Request, dp_size: int) -> dict[str, Any]:
    """``?slot=&pool=&rank=``: who owns a slot. Empty when nothing is asked; 400 for anything else."""
    given = request.query_params
    for name in given:
        if name not in ("slot", "pool", "rank"):
            raise RequestError(f"{name} is unknown; known: slot, pool, rank", param=name)
        if "slot" not in given:
            raise RequestError(f"{name} goes with slot: ?slot=N&pool=full&rank=0", param=name)
    if not given:
        return {}
    pool = given.get("pool", "full")
    if pool not in ("full", "swa"):
        raise RequestError(f"pool is {pool!r}, must be one of full, swa", param="pool")
    rank = _count("rank", given.get("rank", "0"), f"at most {dp_size - 1}", dp_size)
    return {"slot": _count("slot", given["slot"]), "pool": pool, "rank": rank}


@router.get("/get_cache_ledger")
async def get_cache_ledger(request: Request) -> Response:
    """Internal, not a public API: its form may change at any time. Read-only; rank and route come from the scheduler.

    ``?slot=N&pool=full|swa&rank=R`` adds who owns that slot.
    """
    manager = _manager(request)
    if not manager.args.enable_cache_report:
        raise RequestError("the cache ledger is off; start with --enable-cache-report", 403)
    reply = await manager.get_cache_ledger(_slot_question(request, manager.args.dp_size))
    if not reply.ok:
        raise RequestError(str(reply.data.get("message")), int(reply.data.get("status") or 500))
    return json_response({"internal": True, **reply.data})
