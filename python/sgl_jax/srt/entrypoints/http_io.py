"""HTTP plumbing shared by all endpoints: bodies, answers, streams, disconnects. Knows no endpoint."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.types import Receive, Scope, Send

from sgl_jax.srt.managers.frontend.errors import RequestError

MAX_BODY = 64 * 2**20
DONE = b"data: [DONE]\n\n"

Model = TypeVar("Model", bound="StrictModel")
T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has gone; there is nobody to answer."""


class StrictModel(BaseModel):
    """Body of a request: no coercion of types, no NaN; unknown fields are kept for :func:`refuse_unknown_fields`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS), status, headers, "application/json"
    )


def error_response(error: RequestError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return json_response(error.body(), error.status, headers)


def sse(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def read_body(request: Request) -> bytes:
    """The whole body. Raises RequestError 413 above the limit, ClientDisconnected when the client left."""
    parts, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise RequestError(f"the body is larger than {MAX_BODY} bytes", 413)
        if not message.get("more_body"):
            return b"".join(parts)


async def parse_body(request: Request, model: type[Model]) -> Model:
    """The body as ``model``. Raises RequestError 400 naming the field, what it is and what it must be; never 422."""
    body = await read_body(request)
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise _as_request_error(error) from None


def _as_request_error(error: ValidationError) -> RequestError:
    """The most telling of pydantic's findings: of a union's branches the one that got furthest."""
    details = error.errors(include_url=False)
    first = (
        max(details, key=lambda d: len(d["loc"])) if len({d["loc"][:1] for d in details}) == 1 else details[0]
    )
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    where = _field_name(first["loc"])
    if first["type"] == "missing":
        return RequestError(f"{where} is missing", param=where)
    if not first["loc"]:
        return RequestError(f"the body must be a JSON object: {first['msg']}")
    wanted = "; or ".join(dict.fromkeys(d["msg"] for d in details if _field_name(d["loc"]) == where))
    return RequestError(f"{where} is {_short(first['input'])}: {wanted}", param=where)


def _field_name(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` -> ``messages[0].role``; names of union branches are left out."""
    models = {model.__name__ for model in StrictModel.__subclasses__()}
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES and part not in models:
            name += f".{part}" if name else part
    return name


_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict", "function"})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse_unknown_fields(body: StrictModel, neutral: Mapping[str, Collection[Any] | None]) -> None:
    """Fields that are not implemented pass only when they change nothing.

    ``neutral``: known field -> values that mean "off" (None: any value, the field is a label). Raises RequestError 400
    naming any other field, with the nearest known one.
    """
    for name, value in (body.model_extra or {}).items():
        if name in neutral:
            allowed = neutral[name]
            if (
                allowed is None
                or value is None
                or any(value == a and type(value) is type(a) for a in allowed)
            ):
                continue
            raise RequestError(f"{name} is {_short(value)}: not supported, leave it out", param=name)
        near = difflib.get_close_matches(name, [*type(body).model_fields, *neutral], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise RequestError(f"{name} is not a known field{hint}", param=name)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Awaits ``work``; cancels it and raises ClientDisconnected when the client leaves first (D68).

    The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """``text/event-stream`` of already framed events; ends with ``[DONE]``.

    Nothing is sent before the first event, so a request that is refused gets its plain HTTP status. A later error becomes
    a data line with an ``error`` object, then ``[DONE]``. When the client leaves, also before the first event, the source
    is closed, which aborts what it follows.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, receive, send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            watch.cancel()
            pump.cancel()
            await asyncio.gather(pump, watch, return_exceptions=True)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        started = False
        try:
            async for event in self._events:
                if not started:
                    started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await body(event)
        except RequestError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await body(sse(error.body()))
        finally:
            await self._events.aclose()
        await body(DONE, more=False)


def finite(value: float | None) -> float | None:
    """JSON has no infinity: a logprob of -inf is sent as -9999, as OpenAI does."""
    return -9999.0 if value is not None and not math.isfinite(value) else value
