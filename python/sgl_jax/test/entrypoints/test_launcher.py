"""The watch over the scheduler's process: its last words count, and it leaves the exit code to whoever joins the process."""

from __future__ import annotations

import asyncio

import pytest

from sgl_jax.srt.entrypoints import launcher
from sgl_jax.srt.entrypoints.launcher import Launcher, ServerFailed
from sgl_jax.srt.managers.io_struct import Fatal
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.entrypoints.running import GEMMA4


class Child:
    """A scheduler's process that has ended; counts how often it is asked for its exit code."""

    def __init__(self, exitcode: int | None) -> None:
        self._exitcode = exitcode
        self.asked = 0

    @property
    def exitcode(self) -> int | None:
        self.asked += 1
        return self._exitcode


async def watched(child: Child, stopping: bool = False, words_after: float | None = None) -> None:
    """Watches ``child`` for a second; its Fatal message arrives after ``words_after`` seconds."""
    made = Launcher(ServerArgs(model_path=str(GEMMA4)))
    made.process, made._stopping = child, stopping  # type: ignore[assignment]
    if words_after is not None:
        words = Fatal(traceback="ValueError: why")
        asyncio.get_running_loop().call_later(words_after, made.manager._dispatch, words)
    try:
        await asyncio.wait_for(made.watch(), 1.0 if stopping else None)
    finally:
        made.channel.close()


def test_the_reason_of_a_failed_scheduler_may_arrive_after_its_end():
    """The process is seen to have ended before its last message is read: the message is the reason, not the exit code."""
    with pytest.raises(ServerFailed, match="ValueError: why"):
        asyncio.run(watched(Child(1), words_after=5 * launcher._POLL))


@pytest.mark.parametrize("code", [0, -9])
def test_a_scheduler_that_said_nothing_is_named_by_its_exit_code(code):
    with pytest.raises(ServerFailed, match=f"ended with exit code {code}"):
        asyncio.run(watched(Child(code)))


def test_the_exit_code_is_left_to_the_one_who_joins():
    """Two threads that wait for one process: one gets the code, the other nothing, and a clean end looked like a killed one."""
    child = Child(0)
    with pytest.raises(TimeoutError):
        asyncio.run(watched(child, stopping=True))
    assert child.asked == 0
