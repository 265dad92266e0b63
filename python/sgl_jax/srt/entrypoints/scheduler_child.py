"""The scheduler's process, seen from its parent: start it, watch it, end it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import SpawnProcess

from zmq.constants import SocketOption, SocketType
from zmq.sugar.context import Context

from sgl_jax.srt.managers import io_struct
from sgl_jax.srt.managers.frontend.channel import Addresses
from sgl_jax.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SchedulerTarget = Callable[[ServerArgs, str, str], None]
"""``target(server_args, recv_addr, send_addr)``: pulls from the first address, pushes to the second, returns to end."""


def real_scheduler(args: ServerArgs, recv_addr: str, send_addr: str) -> None:
    from sgl_jax.srt.managers.scheduler_process import run_scheduler_process

    run_scheduler_process(args, recv_addr, send_addr)


def start_scheduler(
    args: ServerArgs, addresses: Addresses, target: SchedulerTarget = real_scheduler
) -> SpawnProcess:
    """Starts the child. It ends with its parent, and its failure is sent as Fatal, printed, and exit code 1."""
    process = multiprocessing.get_context("spawn").Process(
        target=_child_main,
        args=(target, args, addresses.to_scheduler, addresses.from_scheduler, os.getpid()),
        name="sgl-jax-scheduler",
    )
    process.start()
    return process


def stop_scheduler(process: SpawnProcess, patience: float) -> int | None:
    """Waits for the end, then terminates. Returns the exit code (None: it had to be killed)."""
    process.join(patience)
    if process.exitcode is not None:
        return process.exitcode
    logger.warning("the scheduler did not end within %g s: killing it", patience)
    process.kill()
    process.join(5)
    return None


def _child_main(
    target: SchedulerTarget, args: ServerArgs, recv_addr: str, send_addr: str, parent: int
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent drains, and says when to end
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # absent platforms are no news
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        target(args, recv_addr, send_addr)
    except SystemExit:
        raise
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        _send_fatal(send_addr, text)
        sys.exit(1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _send_fatal(address: str, text: str) -> None:
    context = Context()
    socket = context.socket(SocketType.PUSH)
    socket.setsockopt(SocketOption.LINGER, 5000)
    socket.connect(address)
    socket.send(io_struct.encode(io_struct.Fatal(traceback=text)))
    socket.close()
    context.term()
