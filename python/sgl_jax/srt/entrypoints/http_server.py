"""``launch``: bind, start, serve, drain, exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

from sgl_jax.srt.entrypoints.launcher import Launcher, ServerFailed, StartRefused
from sgl_jax.srt.entrypoints.scheduler_child import SchedulerTarget, real_scheduler
from sgl_jax.srt.server_args import ServerArgs, ServerArgsError

logger = logging.getLogger(__name__)

OnReady = Callable[[ServerArgs], None]


def bind(args: ServerArgs) -> socket.socket:
    """The listening socket, before anything dear is started. Raises ServerArgsError when the address is taken."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((args.host, args.port))
    except OSError as error:
        sock.close()
        raise ServerArgsError(
            "--port",
            args.port,
            f"cannot listen on {args.host}:{args.port} ({error.strerror})",
            "Choose another --port or --host",
        ) from error
    return sock


def launch(
    args: ServerArgs, target: SchedulerTarget = real_scheduler, on_ready: OnReady | None = None
) -> int:
    """Serves until SIGTERM or SIGINT (exit code 0) or until the scheduler fails (exit code 1, its traceback in the log; a user's
    mistake that only the scheduler can find: its message alone)."""
    sock = bind(args)
    try:
        return asyncio.run(_serve(args, sock, target, on_ready))
    finally:
        sock.close()


async def _serve(
    args: ServerArgs, sock: socket.socket, target: SchedulerTarget, on_ready: OnReady | None
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    launcher = Launcher(args, target)
    manager = await launcher.start()
    try:
        from sgl_jax.srt.entrypoints.listener import (
            Listener,
        )  # dear: imported while the scheduler process loads

        server = Listener(manager)
    except BaseException:
        await launcher.stop()
        raise
    tasks: dict[str, asyncio.Task[Any]] = {
        "http": asyncio.create_task(server.serve(sockets=[sock])),
        "watch": asyncio.create_task(launcher.watch()),
        "stop": asyncio.create_task(stop.wait()),
        "warm": asyncio.create_task(_warm(launcher, server.warm, args, on_ready)),
    }
    failed = await _until_end(tasks)
    if failed is None:
        logger.info("shutting down: %d open requests", manager.open_requests)
        await launcher.drain()
    await asyncio.sleep(0.1)  # answers that just became ready go out first
    server.should_exit = True
    code = await launcher.stop()
    for task in tasks.values():
        if task is not tasks["http"]:
            task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    if failed is not None:
        what = "cannot start" if isinstance(failed, (StartRefused, ServerArgsError)) else "server failed"
        logger.critical("%s: %s", what, failed)
        return 1
    logger.info("shut down")
    return code


async def _warm(launcher: Launcher, warm: asyncio.Event, args: ServerArgs, on_ready: OnReady | None) -> None:
    await launcher.wait_ready()
    warm.set()
    logger.info("The server is fired up and ready to roll! http://%s:%d", args.host, args.port)
    if on_ready is not None:
        on_ready(args)


async def _until_end(tasks: dict[str, asyncio.Task[Any]]) -> BaseException | None:
    """Until a signal (None) or a failure of any part (its exception)."""
    waiting = set(tasks.values())
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if tasks["stop"] in done:
            return None
        for task in done:
            error = task.exception()
            if isinstance(error, ServerFailed) and not isinstance(error, StartRefused):
                return RuntimeError(str(error).strip().splitlines()[-1])
            if error is not None:
                return error
            if task is tasks["http"]:
                return RuntimeError("the HTTP server ended by itself")
