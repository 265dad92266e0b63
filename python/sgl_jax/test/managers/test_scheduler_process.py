"""The scheduler's process over real sockets: ready, heartbeat, tokens, drain and exit; a crash is told before it ends."""

from __future__ import annotations

import threading

import pytest
from zmq.constants import SocketOption, SocketType
from zmq.sugar.context import Context

from sgl_jax.srt.managers import io_struct
from sgl_jax.srt.managers.scheduler_process import is_users_mistake, run_scheduler_process
from sgl_jax.srt.mem_cache.memory_pool.kv_cache import PoolSizeError
from sgl_jax.srt.mem_cache.sizing import PoolConfigError
from sgl_jax.srt.models.safetensors_file import WeightLoadError
from sgl_jax.srt.server_args import ServerArgs
from sgl_jax.test.managers.world import World, make_world

ARGS = ServerArgs(model_path="no-model", log_level="error")


class Parent:
    """The front end's side: it binds both sockets."""

    def __init__(self, tmp_path) -> None:
        self.context = Context()
        self.to_scheduler = self.context.socket(SocketType.PUSH)
        self.from_scheduler = self.context.socket(SocketType.PULL)
        self.from_scheduler.setsockopt(SocketOption.RCVTIMEO, 60_000)
        self.addresses = f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out"
        self.to_scheduler.bind(self.addresses[0])
        self.from_scheduler.bind(self.addresses[1])
        self.error: BaseException | None = None
        self.world: World | None = None

    def build(self, args, send):
        self.world = make_world()
        scheduler = self.world.scheduler
        scheduler._send = scheduler.control._reply = send
        return scheduler

    def start(self, build=None) -> threading.Thread:
        def target():
            try:
                run_scheduler_process(ARGS, *self.addresses, build or self.build)
            except BaseException as error:
                self.error = error

        thread = threading.Thread(target=target)
        thread.start()
        return thread

    def ended(self, thread: threading.Thread) -> BaseException | None:
        """What the scheduler's loop ended with."""
        thread.join(60)
        assert not thread.is_alive()
        return self.error

    def send(self, message) -> None:
        self.to_scheduler.send(io_struct.encode(message))

    def receive(self):
        return io_struct.decode_to_front_end(self.from_scheduler.recv())

    def receive_until(self, kind):
        seen = []
        while True:
            message = self.receive()
            seen.append(message)
            if isinstance(message, kind):
                return message, seen

    def close(self) -> None:
        self.to_scheduler.close(0)
        self.from_scheduler.close(0)
        self.context.term()


@pytest.fixture
def parent(tmp_path):
    made = Parent(tmp_path)
    yield made
    made.close()


def test_ready_tokens_reply_and_drained_exit(parent):
    thread = parent.start()
    ready, _ = parent.receive_until(io_struct.Ready)
    assert ready.info["vocab_size"] == 997
    beat, _ = parent.receive_until(io_struct.Heartbeat)
    assert beat.busy is False and len(beat.stats["ranks"]) == 1
    sampling = io_struct.SamplingParams(max_new_tokens=5, temperature=0.0)
    parent.send(io_struct.GenerateReq(rid="a", input_ids=[5, 6, 7], sampling=sampling))
    tokens = []
    while len(tokens) < 5:
        batch, _ = parent.receive_until(io_struct.TokenBatch)
        tokens += [token for out in batch.outs for token in out.token_ids]
    parent.world.prompts["a"] = [5, 6, 7]
    assert tokens == parent.world.expected("a", 5)
    parent.send(io_struct.ControlReq(kind="flush_cache", req_id="f"))
    reply, _ = parent.receive_until(io_struct.Reply)
    assert (reply.req_id, reply.ok) == ("f", True)
    parent.send(io_struct.GenerateReq(rid="b", input_ids=[8, 9], sampling=sampling))
    parent.send(io_struct.ShutdownReq(drain=True))
    last = []
    while not last or last[-1].finish is None:
        last += parent.receive_until(io_struct.TokenBatch)[0].outs
    assert last[-1].finish.type == "length" and sum(len(out.token_ids) for out in last) == 5
    assert parent.ended(thread) is None
    assert not [message for message in drain(parent) if not isinstance(message, io_struct.Heartbeat)]


def drain(parent):
    parent.from_scheduler.setsockopt(SocketOption.RCVTIMEO, 500)
    from zmq.error import Again

    while True:
        try:
            yield parent.receive()
        except Again:
            return


@pytest.mark.parametrize("where", ["build", "step"])
def test_a_crash_sends_its_traceback_and_raises(parent, where):
    def build(args, send):
        if where == "build":
            raise RuntimeError("no model here")
        scheduler = parent.build(args, send)

        def broken(step):
            raise RuntimeError("the device is gone")

        scheduler.worker.launch = broken
        return scheduler

    thread = parent.start(build)
    if where == "step":
        parent.receive_until(io_struct.Ready)
        sampling = io_struct.SamplingParams(max_new_tokens=5)
        parent.send(io_struct.GenerateReq(rid="a", input_ids=[5, 6, 7], sampling=sampling))
    fatal, _ = parent.receive_until(io_struct.Fatal)
    text = "no model here" if where == "build" else "the device is gone"
    assert "Traceback" in fatal.traceback and text in fatal.traceback
    assert text in str(parent.ended(thread))


MISTAKES = [
    PoolConfigError("--max-total-tokens", 8, "at least 96 are needed", "Raise it"),
    WeightLoadError("model.safetensors lacks 2 tensors:\n  a.weight\n  b.weight"),
    ValueError("--precompile-bs-paddings [0]: values must lie in 1..8"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda error: type(error).__name__)
def test_a_users_mistake_sends_its_whole_message_and_no_traceback(parent, mistake):
    def build(args, send):
        raise mistake

    thread = parent.start(build)
    fatal, _ = parent.receive_until(io_struct.Fatal)
    error = parent.ended(thread)
    assert fatal == io_struct.Fatal(traceback=str(mistake), mistake=True)
    assert isinstance(error, SystemExit) and error.code == 1
    assert not list(drain(parent))


@pytest.mark.parametrize(
    "bug", [ValueError("cannot reshape array"), PoolSizeError("layer 0"), KeyError("--page-size")], ids=repr
)
def test_a_bug_is_no_mistake_of_the_user(bug):
    assert not is_users_mistake(bug)


def test_heartbeats_go_on_while_idle(parent):
    thread = parent.start()
    beats = [parent.receive_until(io_struct.Heartbeat)[0] for _ in range(3)]
    assert beats[0].loop_count < beats[2].loop_count
    parent.send(io_struct.ShutdownReq(drain=False))
    assert parent.ended(thread) is None
