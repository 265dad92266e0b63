"""``Engine``: the server's processes without HTTP, for Python programs.

The scheduler is a spawned process, so a script must create the engine under ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from sgl_jax.srt.entrypoints.info import server_info
from sgl_jax.srt.entrypoints.launcher import Launcher
from sgl_jax.srt.entrypoints.native_api import GenerateBody, generate, stream
from sgl_jax.srt.entrypoints.scheduler_child import SchedulerTarget, real_scheduler
from sgl_jax.srt.server_args import ServerArgs

T = TypeVar("T")


class Engine:
    """Starts on construction and is ready when the constructor returns; ``shutdown`` ends it (also as a context manager).

    ``Engine(model_path=..., page_size=128)`` takes server arguments, or one ``server_args``. Calls are thread-safe. Raises
    ServerArgsError for bad arguments and ServerFailed, with the traceback, when the scheduler cannot start or dies.
    """

    def __init__(
        self,
        server_args: ServerArgs | None = None,
        *,
        scheduler: SchedulerTarget = real_scheduler,
        **arguments: Any,
    ) -> None:
        self.server_args = server_args if server_args is not None else ServerArgs(**arguments)
        self._scheduler = scheduler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sgl-jax-engine", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._run(self._start())
        except BaseException:
            self.shutdown()
            raise

    async def _start(self) -> None:
        self._launcher = Launcher(self.server_args, self._scheduler)
        self._manager = await self._launcher.start()
        self._watch = asyncio.ensure_future(self._launcher.watch())
        ready = asyncio.ensure_future(self._launcher.wait_ready())
        await asyncio.wait({self._watch, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await self._watch
        ready.result()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        **fields: Any,
    ) -> Any:
        """What ``POST /generate`` answers to the same fields: one dict, or a list for a batch. Raises RequestError."""
        return self._run(generate(self._manager, _body(prompt, sampling_params, input_ids, fields)))

    def stream(
        self, prompt: str | None = None, sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """The parts of a streamed ``/generate``, with cumulative text. Leaving the iterator early aborts the request."""
        parts = stream(self._manager, _body(prompt, sampling_params, fields.pop("input_ids", None), fields))
        try:
            while (part := self._run(_next(parts))) is not None:
                yield part
        finally:
            if not self._closed:
                self._run(parts.aclose())

    def flush_cache(self, timeout: float = 0.0) -> dict[str, Any]:
        """Per rank what was freed; ``success`` False with ``pending`` while something runs."""
        reply = self._run(self._manager.flush_cache(timeout))
        return {"success": reply.ok, **reply.data}

    def get_server_info(self) -> dict[str, Any]:
        return self._run(server_info(self._manager, "ready", 5.0))

    def shutdown(self) -> None:
        """Ends the scheduler process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_launcher"):
            self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        if hasattr(self, "_watch"):
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._launcher.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


async def _next(parts: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(parts, None)


def _body(prompt: Any, sampling_params: Any, input_ids: Any, fields: dict[str, Any]) -> GenerateBody:
    given = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **fields}
    return GenerateBody.model_validate({k: v for k, v in given.items() if v is not None})
