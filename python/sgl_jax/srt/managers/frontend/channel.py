"""The front end's two ZeroMQ sockets. The front end binds, the scheduler connects; one frame is one io_struct message."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass

from zmq.asyncio import Context, Socket
from zmq.constants import SocketOption, SocketType

from sgl_jax.srt.managers import io_struct


@dataclass(frozen=True, slots=True)
class Addresses:
    """``to_scheduler``: the scheduler pulls from it. ``from_scheduler``: the scheduler pushes to it."""

    to_scheduler: str
    from_scheduler: str


class SchedulerChannel:
    """PUSH and PULL sockets of one front end. Made inside the running event loop; ``close`` removes the socket files."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="sgl-jax-")
        self.addresses = Addresses(
            f"ipc://{os.path.join(self._folder, 'in')}", f"ipc://{os.path.join(self._folder, 'out')}"
        )
        self._context = Context()
        self._push = self._socket(SocketType.PUSH, self.addresses.to_scheduler)
        self._pull = self._socket(SocketType.PULL, self.addresses.from_scheduler)

    def _socket(self, kind: int, address: str) -> Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(SocketOption.SNDHWM, 0)
        socket.setsockopt(SocketOption.RCVHWM, 0)
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.bind(address)
        return socket

    async def send(self, message: io_struct.ToScheduler) -> None:
        """Queues a message; order is kept. Before the scheduler has connected, waits for it."""
        await self._push.send(io_struct.encode(message))

    async def receive(self) -> io_struct.ToFrontEnd:
        return io_struct.decode_to_front_end(await self._pull.recv())

    def close(self) -> None:
        """Idempotent."""
        self._push.close()
        self._pull.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
