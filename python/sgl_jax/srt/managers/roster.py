"""Who is where: the waiting queue, the seats and the chunked prompt of every rank, and the index of live requests."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_jax.srt.managers.request import Req, RequestState, WaitReason
from sgl_jax.srt.managers.seats import RankSeats


class Roster:
    """Lists of length ``dp_size``. A live request is in exactly one waiting queue or one seat of its rank.

    ``chunked[rank]`` is the seated request whose prompt is being prefilled in chunks, at most one per rank.
    """

    def __init__(self, dp_size: int, seats_per_rank: int) -> None:
        self.dp_size = dp_size
        self.waiting: list[list[Req]] = [[] for _ in range(dp_size)]
        self.seats = [RankSeats(seats_per_rank) for _ in range(dp_size)]
        self.chunked: list[Req | None] = [None] * dp_size
        self.by_rid: dict[str, Req] = {}

    # -------------------------------------------------------------------------------------------------------------- moves
    def enqueue(self, req: Req, rank: int, *, front: bool = False) -> None:
        req.dp_rank = rank
        req.state = RequestState.WAITING
        self.by_rid[req.rid] = req
        if front:
            self.waiting[rank].insert(0, req)
        else:
            self.waiting[rank].append(req)

    def start_decoding(self, req: Req) -> None:
        self.seats_of(req).start_decoding(req)

    def take_seat(self, req: Req) -> None:
        """From the head of admission to a seat. The caller removes it from the queue (:meth:`dequeue`)."""
        self.seats_of(req).seat(req)
        req.state = RequestState.PREFILL

    def dequeue(self, rank: int, admitted: list[Req]) -> None:
        """Drop the admitted requests from the queue, in one pass."""
        if admitted:
            gone = {id(req) for req in admitted}
            self.waiting[rank] = [req for req in self.waiting[rank] if id(req) not in gone]

    def leave_seat(self, req: Req) -> None:
        rank = self.rank_of(req)
        if self.chunked[rank] is req:
            self.chunked[rank] = None
        self.seats[rank].vacate(req)

    def forget(self, req: Req) -> None:
        """The request is over. Forgetting twice is harmless."""
        req.state = RequestState.FINISHED
        if self.by_rid.get(req.rid) is req:
            del self.by_rid[req.rid]

    # ------------------------------------------------------------------------------------------------------------ queries
    def rank_of(self, req: Req) -> int:
        """The scheduler's rank. Raises RuntimeError for a request that was never assigned one."""
        if req.dp_rank is None:
            raise RuntimeError(f"request {req.rid} has no rank yet")
        return req.dp_rank

    def seats_of(self, req: Req) -> RankSeats:
        return self.seats[self.rank_of(req)]

    def seated(self) -> Iterator[Req]:
        for seats in self.seats:
            yield from seats.requests()

    def live_requests(self, rank: int) -> list[Req]:
        """Seated requests of a rank with up-to-date lengths: what ledger and checks look at."""
        self.seats[rank].settle_all()
        return list(self.seats[rank].requests())

    def load(self, rank: int) -> int:
        """Requests assigned to the rank, running and queued."""
        return self.seats[rank].taken_count + len(self.waiting[rank])

    @property
    def running_count(self) -> int:
        return sum(seats.taken_count for seats in self.seats)

    @property
    def queued_count(self) -> int:
        return sum(len(queue) for queue in self.waiting)

    def is_empty(self) -> bool:
        return not self.by_rid and self.running_count == 0 and self.queued_count == 0

    def mark_waiting(self, reason: WaitReason) -> None:
        for queue in self.waiting:
            for req in queue:
                req.wait_reason = reason
