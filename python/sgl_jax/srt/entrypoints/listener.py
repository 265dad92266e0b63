"""The HTTP side of a server: application and uvicorn. Imported while the scheduler process already loads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

from sgl_jax.srt.entrypoints.app import create_app
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager


class Listener(uvicorn.Server):
    """uvicorn over a manager, without its own signal handlers: the drain is ours.

    ``warm`` is set by the owner when the server is ready for work.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        app = create_app(manager)
        self.warm: asyncio.Event = app.state.warm
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=manager.args.log_level == "debug",
                lifespan="off",
                timeout_keep_alive=120,
                timeout_graceful_shutdown=5,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
