"""Random traffic as a list of plain operations, so that a failing case can be replayed and shrunk.

Operations: ``submit`` a :class:`Submit`; ``step`` n turns; ``abort`` the k-th newest rid; ``abort_all``; ``pause`` mode;
``continue``; ``flush`` timeout; ``view`` kind; ``tick`` seconds; ``settle`` (continue, run until idle, check the books);
``probe`` a prompt twice on a cold cache; ``twin`` a prompt beside itself; ``largest`` request of the plan; ``shutdown`` drain.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

from sgl_jax.srt.model_executor.noop_worker import hash_reference
from sgl_jax.test.managers.fuzz.config import FIRST_TOKEN, VOCAB, FuzzConfig

Op = tuple[str, Any]

_BASES = 8
_BASE_LENGTH = 2048
_VIEWS = ("internal_state", "load", "ledger", "health", "heartbeat", "nonsense")


@dataclass(frozen=True, slots=True)
class Submit:
    """A request. The prompt is ``base[:length]``, then ``continued`` tokens of its own output, then ``tail`` random ones."""

    base: int
    length: int
    continued: int = 0
    tail: int = 0
    tail_seed: int = 0
    max_new: int = 8
    copies: int = 1
    stream: bool = False
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_new: int = 0
    ignore_eos: bool = False
    penalty: bool = False
    logprob: bool = False
    logprob_start: int = -1
    top: int = 0
    extra_key: str | None = None
    dp_rank: int | None = None
    reuse_rid: bool = False
    bad: str = ""

    def prompt(self, window: int | None) -> list[int]:
        """Token ids. ``window`` as the device sees it: the continuation is what the device would generate."""
        tokens = list(base_tokens(self.base)[: self.length])
        if self.continued and tokens:
            tokens += hash_reference(tokens, self.continued, VOCAB, window)
        rng = random.Random(self.tail_seed)
        tokens += [rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(self.tail)]
        if self.bad == "empty":
            return []
        if self.bad == "id":
            return [*tokens, VOCAB]
        return tokens


@functools.cache
def base_tokens(index: int) -> tuple[int, ...]:
    """A branch of the prompt tree: it leaves its parent (``index // 2``) at a place of its own."""
    rng = random.Random(f"base {index}")
    own = tuple(rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(_BASE_LENGTH))
    if index == 0:
        return own
    shared = rng.choice([1, 4, 7, 16, 33, 64, 130, 256, 300])
    return (base_tokens(index // 2)[:shared] + own)[:_BASE_LENGTH]


@dataclass(frozen=True, slots=True)
class Profile:
    """Which habits the clients of a case have; each a probability or an amount."""

    requests: int
    burst: int
    abort: float
    control: float
    pause: float
    flush: float
    settle: float
    resend: float
    shared: float
    long: float
    extras: float
    stop: float
    steps: int
    most_new: int


def draw_profile(rng: random.Random, config: FuzzConfig) -> Profile:
    big = config.page >= 64
    return Profile(
        requests=rng.choice([8, 20, 40] if big else [12, 30, 60, 60, 100, 300]),
        burst=rng.choice([1, 2, 4, 12, 12, 50]),
        abort=rng.choice([0.0, 0.05, 0.25]),
        control=rng.choice([0.0, 0.05, 0.2]),
        pause=rng.choice([0.0, 0.0, 0.05, 0.2]),
        flush=rng.choice([0.0, 0.03, 0.1]),
        settle=rng.choice([0.0, 0.02, 0.1, 0.5]),
        resend=rng.choice([0.1, 0.3, 0.6]),
        shared=rng.choice([0.3, 0.9, 1.0]),
        long=rng.choice([0.0, 0.02, 0.1, 0.3]),
        extras=rng.choice([0.0, 0.1, 0.4]),
        stop=rng.choice([0.0, 0.1, 0.4]),
        steps=rng.choice([1, 2, 5, 15]),
        most_new=rng.choice([2, 10, 30, 60, 2 * config.page + 3, config.context // 2, config.context]),
    )


def _length(rng: random.Random, config: FuzzConfig, long: float) -> int:
    page, context = config.page, config.context
    if rng.random() < long:
        room = config.full_tokens - config.page
        return max(
            1,
            rng.choice([context - 1, context, context + 3, context - 2, room, room - 1, room + 1, room // 2]),
        )
    most = max(2, min(context - 1, rng.choice([12, 3 * page, 4 * config.window, context // 2])))
    choice = rng.random()
    if choice < 0.35:
        return max(1, rng.randint(1, max(1, most // page)) * page + rng.choice([0, 0, 0, 1, -1]))
    if choice < 0.45:
        return max(1, config.window + rng.choice([-1, 0, 1]))
    return rng.randint(1, most)


def draw_submit(rng: random.Random, config: FuzzConfig, profile: Profile, sent: list[Submit]) -> Submit:
    """A new request, or one that resembles an earlier one."""
    if sent and rng.random() < profile.resend:
        old = rng.choice(sent[-8:])
        base, length, continued, tail, seed = old.base, old.length, old.continued, old.tail, old.tail_seed
        kind = rng.random()
        if kind < 0.3:
            continued, tail, seed = (
                rng.choice([1, 3, config.page, config.window]),
                rng.choice([0, 1, 5]),
                rng.randrange(999),
            )
        elif kind < 0.5:
            length, tail, seed = (
                max(1, length - rng.randint(0, config.window + config.page)),
                rng.choice([0, 2, 9]),
                rng.randrange(999),
            )
    else:
        base = rng.randrange(2) if rng.random() < profile.shared else rng.randrange(_BASES)
        length, continued, seed = _length(rng, config, profile.long), 0, rng.randrange(999)
        tail = rng.choice([0, 0, 0, 1, 6, config.page])
    most = profile.most_new
    extra = rng.random() < profile.extras
    stops = rng.random() < profile.stop
    logprob = rng.random() < profile.extras / 2
    longest = length + continued + tail
    return Submit(
        base=base,
        length=length,
        continued=continued,
        tail=tail,
        tail_seed=seed,
        max_new=rng.choice(
            [1, 1, 2, 5, rng.choice([0, 3]), rng.randint(1, most), rng.randint(1, most), most]
        ),
        copies=rng.choice([1] * 9 + [2, 3]),
        stream=rng.random() < 0.5,
        stop_ids=tuple(rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(rng.choice([1, 30])))
        if stops
        else (),
        stop=tuple(rng.choice([("ab",), ("dca", "bb"), ("cccc",)])) if stops and rng.random() < 0.3 else (),
        min_new=rng.choice([0, 1, 3, 12]) if rng.random() < 0.2 else 0,
        ignore_eos=rng.random() < 0.2,
        penalty=extra and rng.random() < 0.2,
        logprob=logprob,
        logprob_start=rng.choice([-1, 0, 1, longest // 2, longest - 1]) if logprob else -1,
        top=rng.choice([0, 2]) if logprob else 0,
        extra_key=rng.choice([None, "a", "b"]) if extra else None,
        dp_rank=rng.choice([None, 0, 1, 7]) if extra else None,
        reuse_rid=extra and rng.random() < 0.2,
        bad=rng.choice(["empty", "id"]) if extra and rng.random() < 0.05 else "",
    )


def draw_ops(rng: random.Random, config: FuzzConfig) -> list[Op]:
    """The operations of one case."""
    profile = draw_profile(rng, config)
    ops: list[Op] = []
    sent: list[Submit] = []
    while len(sent) < profile.requests:
        for _ in range(rng.randint(1, profile.burst)):
            sent.append(draw_submit(rng, config, profile, sent))
            ops.append(("submit", sent[-1]))
        ops.extend(_disturbances(rng, profile, sent))
        ops.append(("step", rng.randint(1, profile.steps)))
        if rng.random() < profile.settle:
            ops.append(("settle", None))
    ops.append(("settle", None))
    if rng.random() < 0.5:
        ops.append(("probe", rng.choice(sent)))
    if rng.random() < 0.5:
        length = rng.randint(config.page + 1, max(config.page + 1, config.context // 3))
        ops.append(("twin", Submit(rng.randrange(_BASES), length)))
    if rng.random() < 0.3:
        ops.append(("largest", rng.choice([1, 2, config.page + 1, config.context // 2, config.context])))
    if rng.random() < 0.15:
        ops += [("submit", rng.choice(sent)), ("step", rng.randint(0, 3)), ("shutdown", rng.random() < 0.5)]
        ops += [("submit", rng.choice(sent)), ("settle", None)]
    return ops


def _disturbances(rng: random.Random, profile: Profile, sent: list[Submit]) -> list[Op]:
    ops: list[Op] = []
    if rng.random() < profile.abort:
        ops += [("step", rng.randint(0, 3)), ("abort", rng.randrange(6))]
        if rng.random() < 0.2:
            ops.append(("abort", rng.randrange(6)))
        if rng.random() < 0.05:
            ops.append(("abort_all", None))
    if rng.random() < profile.control:
        ops += [("view", rng.choice(_VIEWS)), ("tick", rng.choice([0.1, 5.0]))]
    if rng.random() < profile.flush:
        ops.append(("flush", rng.choice([0.0, 0.0, 1.0, 1000.0])))
    if rng.random() < profile.pause:
        ops.append(("pause", rng.choice(["abort", "retract", "retract", "in_place", "in_place", "wrong"])))
        for _ in range(rng.randint(0, 3)):
            ops.append(
                rng.choice(
                    [
                        ("step", 2),
                        ("abort", rng.randrange(4)),
                        ("submit", rng.choice(sent)),
                        ("flush", 0.0),
                        ("tick", 2.0),
                    ]
                )
            )
        if rng.random() < 0.9:
            ops.append(("continue", None))
    return ops
