"""``GET /v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from sgl_jax.srt.entrypoints.http_io import json_response
from sgl_jax.srt.entrypoints.openai.protocol import check_model
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

router = APIRouter()


def _card(manager: TokenizerManager, created: int) -> dict[str, Any]:
    return {
        "id": manager.args.served_model_name,
        "object": "model",
        "created": created,
        "owned_by": "sglang",
        "root": manager.args.model_path,
        "max_model_len": manager.limits.context_len if manager.limits is not None else None,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    manager: TokenizerManager = request.app.state.manager
    return json_response({"object": "list", "data": [_card(manager, request.app.state.started_at)]})


@router.get("/v1/models/{model_id:path}")
async def one_model(request: Request, model_id: str) -> Response:
    manager: TokenizerManager = request.app.state.manager
    check_model(manager, model_id)
    return json_response(_card(manager, request.app.state.started_at))
