"""Liveness, readiness and metrics. These answer without a key, and as the very first call.

``/health``: the scheduler loop gives heartbeats (a slow prefill is alive, a stuck loop is not). ``/ready``: warm, not draining.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sgl_jax.srt.entrypoints.http_io import json_response
from sgl_jax.srt.entrypoints.probe import generate_one_token
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()

GENERATE_TIMEOUT = 20.0


def status(request: Request) -> str:
    """starting, ready, draining or dead."""
    manager: TokenizerManager = request.app.state.manager
    if not manager.liveness().alive:
        return "dead"
    if manager.draining:
        return "draining"
    return "ready" if request.app.state.warm.is_set() else "starting"


def _answer(request: Request, good: tuple[str, ...]) -> Response:
    manager: TokenizerManager = request.app.state.manager
    state, life = status(request), manager.liveness()
    body: dict[str, Any] = {
        "status": state,
        "heartbeat_age": round(life.age, 3),
        "loop_count": life.loop_count,
        "busy": life.busy,
    }
    return json_response(body, 200 if state in good else 503)


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    return _answer(request, ("ready", "draining"))


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(request: Request) -> Response:
    return _answer(request, ("ready",))


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """One token through the scheduler. Long prefills before it are no failure while the loop turns (D76)."""
    manager: TokenizerManager = request.app.state.manager
    if status(request) != "ready":
        return _answer(request, ("ready",))
    before = manager.liveness().loop_count
    try:
        await asyncio.wait_for(generate_one_token(manager), GENERATE_TIMEOUT)
    except TimeoutError:
        if manager.liveness().loop_count == before:
            return json_response(
                {"status": "stuck", "detail": f"no token and no loop turn in {GENERATE_TIMEOUT:g} s"}, 503
            )
    except RequestError as error:
        if error.status != 503:
            return json_response({"status": "failed", "detail": error.message}, 503)
        # a full queue: the scheduler answered, so it lives
    return _answer(request, ("ready",))


@router.api_route("/metrics", methods=["GET", "HEAD"])
async def metrics(request: Request) -> Response:
    manager: TokenizerManager = request.app.state.manager
    if not manager.args.enable_metrics:
        raise RequestError("metrics are off; start with --enable-metrics", 404)
    return Response(manager.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})
