"""Node ids, counted per class."""

from __future__ import annotations

_next_ids: dict[type, int] = {}


class NumberedNodes(type):
    """Metaclass of node classes: ``counter`` is the id the next node of the class gets, one more with every node made.

    It stands beside the class, not in it: writing a class attribute makes the interpreter forget what it knows about all
    attributes of all nodes, which is paid for at every later access.
    """

    @property
    def counter(cls) -> int:
        return _next_ids.get(cls, 0)

    @counter.setter
    def counter(cls, value: int) -> None:
        _next_ids[cls] = value

    def take_id(cls, node_id: int | None = None) -> int:
        """``node_id``, else the counter; either way one node more was made."""
        fresh = _next_ids.get(cls, 0)
        _next_ids[cls] = fresh + 1
        return fresh if node_id is None else node_id
