"""The FastAPI application: routes, key check, error forms."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import cast

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_jax import __version__
from sgl_jax.srt.entrypoints import admin, health, native_api
from sgl_jax.srt.entrypoints.http_io import ClientDisconnected, error_response
from sgl_jax.srt.entrypoints.openai import chat, completions, models
from sgl_jax.srt.managers.frontend.errors import RequestError
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics"})


class KeyCheck:
    """401 without the right ``Authorization: Bearer`` key; health and metrics are exempt."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = RequestError(
                    "missing or wrong API key (Authorization: Bearer KEY)", 401, code="invalid_api_key"
                )
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _on_request_error(_: Request, error: Exception) -> Response:
    return error_response(cast(RequestError, error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same form as every other error."""
    known = cast(HTTPException, error)
    return error_response(
        RequestError(f"{request.method} {request.url.path}: {known.detail}", known.status_code)
    )


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.exception("error in %s %s", request.method, request.url.path, exc_info=error)
    return error_response(RequestError("internal error; the server's log has the traceback", 500))


def create_app(manager: TokenizerManager) -> FastAPI:
    """The application over a manager. ``app.state.warm`` is set when the server is ready for work."""
    app = FastAPI(title="sgl-jax", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.manager = manager
    app.state.warm = asyncio.Event()
    app.state.started_at = int(time.time())
    for module in (health, native_api, completions, chat, models, admin):
        app.include_router(module.router)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    if manager.args.api_key is not None:
        app.add_middleware(KeyCheck, api_key=manager.args.api_key)
    return app
