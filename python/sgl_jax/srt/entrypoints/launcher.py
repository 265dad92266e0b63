"""One server: front end and scheduler process together, from start to end. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from multiprocessing.context import SpawnProcess

from sgl_jax.srt.entrypoints.probe import generate_one_token
from sgl_jax.srt.entrypoints.scheduler_child import (
    SchedulerTarget,
    real_scheduler,
    start_scheduler,
    stop_scheduler,
)
from sgl_jax.srt.managers.frontend.channel import SchedulerChannel
from sgl_jax.srt.managers.frontend.tokenizer import load_tokenizer
from sgl_jax.srt.managers.prometheus_metrics import FrontEndMetrics
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager
from sgl_jax.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_POLL = 0.2
_LAST_WORDS = 5.0


class ServerFailed(RuntimeError):
    """The scheduler ended or got stuck. The message is its traceback, or what is known."""


class StartRefused(ServerFailed):
    """The scheduler cannot start with these flags or this checkpoint. The message, maybe of several lines, is for the user."""


class Launcher:
    """Owns the channel, the manager and the scheduler process.

    ``start`` returns at once with the manager; ``wait_ready`` when the scheduler is warm; ``watch`` raises ServerFailed when
    it dies; ``stop`` ends it. All on one event loop.
    """

    def __init__(self, args: ServerArgs, target: SchedulerTarget = real_scheduler) -> None:
        self._args = args
        self._target = target
        self._stopping = False
        self._receiver: asyncio.Task[None] | None = None
        self._tokenizer_loaded = asyncio.Event()
        self.channel = SchedulerChannel()
        metrics = FrontEndMetrics(args.served_model_name, args.dp_size)
        self.manager = TokenizerManager(args, self.channel, None, metrics)
        self.process: SpawnProcess | None = None

    async def start(self) -> TokenizerManager:
        """Starts the scheduler process and the receive loop, then loads the tokenizer while the model loads."""
        self.process = start_scheduler(self._args, self.channel.addresses, self._target)
        self._receiver = asyncio.create_task(self.manager.run())
        self._receiver.add_done_callback(self._receiver_ended)
        return self.manager

    def _receiver_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.manager.scheduler_died(f"the receive loop failed: {task.exception()!r}")

    async def wait_ready(self) -> None:
        """Until model and tokenizer are loaded, and one token was made and its traces flushed (unless --skip-server-warmup)."""
        self.manager.tokenizer = await asyncio.to_thread(load_tokenizer, self._args)
        await self.manager.scheduler_ready.wait()
        if not self._args.skip_server_warmup:
            await generate_one_token(self.manager)
            await self.manager.flush_cache(10.0)

    async def watch(self) -> None:
        """Runs until cancelled. Raises ServerFailed when the scheduler has died or its loop is stuck."""
        while True:
            await asyncio.sleep(_POLL)
            # While `stop` joins the process in a thread, nobody else may ask for its exit code: only one of two waits gets it.
            if self.manager.fatal is None and not self._stopping and (code := self._exit_code()) is not None:
                await self._last_words(code)
                self.manager.scheduler_died(f"the scheduler process ended with exit code {code}")
            life = self.manager.liveness()
            if self.manager.fatal is None and not life.alive and self.manager.scheduler_ready.is_set():
                self.manager.scheduler_died(
                    f"no heartbeat of the scheduler loop for {life.age:.0f} s (--watchdog-timeout "
                    f"{self._args.watchdog_timeout:g}): the loop is stuck"
                )
            if self.manager.fatal is not None:
                raise (StartRefused if self.manager.fatal_is_mistake else ServerFailed)(self.manager.fatal)

    async def _last_words(self, code: int) -> None:
        """A scheduler that fails has sent why before it ends (exit code 1), but that may still be under way. A killed one has not."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (_LAST_WORDS if code > 0 else _POLL)
        while self.manager.fatal is None and loop.time() < until:
            await asyncio.sleep(_POLL / 10)

    def _exit_code(self) -> int | None:
        return self.process.exitcode if self.process is not None else None

    async def drain(self) -> None:
        """Takes no new requests and waits, up to --drain-timeout, until the open ones are done."""
        self.manager.draining = True
        deadline = asyncio.get_running_loop().time() + self._args.drain_timeout
        while self.manager.open_requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        if self.manager.open_requests:
            logger.warning(
                "%d requests still ran after --drain-timeout: aborting them", self.manager.open_requests
            )

    async def stop(self) -> int:
        """Ends the scheduler and frees everything. Returns its exit code; idempotent."""
        self._stopping = True
        code: int | None = 0
        if self.process is not None:
            if (
                self.process.is_alive()
                and self.manager.fatal is None
                and self.manager.scheduler_ready.is_set()
            ):
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self.manager.shut_down(drain=False), 5)
                code = await asyncio.to_thread(stop_scheduler, self.process, 20.0)
            else:  # still loading, or dead: there is nobody to ask
                if self.process.is_alive() and self.manager.fatal is None:
                    self.process.kill()
                patience = 10.0 if self.manager.fatal_is_mistake else 1.0  # after a mistake it ends by itself
                code = await asyncio.to_thread(stop_scheduler, self.process, patience)
                code = 1 if self.manager.fatal is not None else 0
            self.process = None
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        self.channel.close()
        return 1 if code is None else code
