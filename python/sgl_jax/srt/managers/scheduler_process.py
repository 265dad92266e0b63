"""The scheduler's process: messages in over ZeroMQ, steps, messages out, a heartbeat about once a second.

The front end binds both sockets; this side connects. The process ends by returning (after a ``ShutdownReq`` and the drain), or
by raising: then the traceback has been sent as ``Fatal`` first, so that the server never hangs in silence. A user's mistake that
only shows while the scheduler is built (weights, pools, devices) is sent as its message alone, and ends the process with code 1.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable

from zmq.constants import PollEvent, SocketOption, SocketType
from zmq.error import Again
from zmq.sugar.context import Context
from zmq.sugar.socket import Socket

from sgl_jax.srt.managers.build import build_scheduler
from sgl_jax.srt.managers.io_struct import Fatal, ToFrontEnd, decode_to_scheduler, encode
from sgl_jax.srt.managers.scheduler import Scheduler
from sgl_jax.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
_LINGER_MS = 5000
_NOBLOCK = 1

Builder = Callable[[ServerArgs, Callable[[ToFrontEnd], None]], Scheduler]


def _default_builder(args: ServerArgs, send: Callable[[ToFrontEnd], None]) -> Scheduler:
    return build_scheduler(args, send=send)


def run_scheduler_process(
    server_args: ServerArgs, recv_addr: str, send_addr: str, build: Builder = _default_builder
) -> None:
    """Build the scheduler, send ``Ready``, then loop until shut down and drained.

    Raises what the scheduler raises; SystemExit(1) after a user's mistake, which was sent.
    """
    logging.basicConfig(
        level=server_args.log_level.upper(),
        format="[%(asctime)s] %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    context = Context()
    inbox, outbox = context.socket(SocketType.PULL), context.socket(SocketType.PUSH)
    outbox.setsockopt(SocketOption.LINGER, _LINGER_MS)
    inbox.connect(recv_addr)
    outbox.connect(send_addr)
    try:
        scheduler = _build(build, server_args, outbox)
        gc.collect()
        gc.freeze()  # weights, tables and modules are never garbage: full collections need not look at them
        outbox.send(encode(scheduler.ready()))
        _loop(scheduler, inbox, outbox)
    except Exception:
        outbox.send(encode(Fatal(traceback=traceback.format_exc())))
        raise
    finally:
        inbox.close(0)
        outbox.close()
        context.term()


def is_users_mistake(error: Exception) -> bool:
    """Whether ``error``, raised while a scheduler is built, is a flag or a checkpoint that cannot be used, and says so itself.

    Those are our named ValueErrors (flags, configuration, devices, pool sizes), ValueErrors that name a flag, and bad weights.
    Anything else is a bug, whose traceback matters.
    """
    from sgl_jax.srt.models.safetensors_file import WeightLoadError

    if isinstance(error, WeightLoadError):
        return True
    if not isinstance(error, ValueError) or isinstance(error, AssertionError):
        return False
    return (type(error) is not ValueError and type(error).__module__.startswith("sgl_jax.")) or "--" in str(
        error
    )


def _build(build: Builder, args: ServerArgs, outbox: Socket[bytes]) -> Scheduler:
    try:
        return build(args, lambda message: outbox.send(encode(message)))
    except Exception as error:
        if not is_users_mistake(error):
            raise
        logger.debug("start refused", exc_info=True)
        outbox.send(encode(Fatal(traceback=str(error), mistake=True)))
        raise SystemExit(1) from None


def _loop(scheduler: Scheduler, inbox: Socket[bytes], outbox: Socket[bytes]) -> None:
    """Receive all that is there, do one turn; sleep on the inbox when a turn found nothing to do."""
    beat_at = 0.0
    while True:
        now = time.monotonic()
        if now >= beat_at:
            outbox.send(encode(scheduler.heartbeat()))
            beat_at = now + HEARTBEAT_SECONDS
        _receive(scheduler, inbox)
        progress = scheduler.step()
        if scheduler.finished:
            logger.info("Scheduler drained, ending")
            return
        if not progress:
            inbox.poll(max(1, int((beat_at - time.monotonic()) * 1000)), PollEvent.POLLIN)


def _receive(scheduler: Scheduler, inbox: Socket[bytes]) -> None:
    while True:
        try:
            data = inbox.recv(_NOBLOCK)
        except Again:
            return
        scheduler.handle(decode_to_scheduler(data))
