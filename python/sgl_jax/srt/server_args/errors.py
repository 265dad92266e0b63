"""The one error a user's start-up mistake raises."""

from __future__ import annotations


class ServerArgsError(ValueError):
    """A flag, or a pair of flags, that the server will not start with.

    The text always says flag, value, limit and what to type instead; the parts are attributes for tools.
    """

    def __init__(self, flag: str, value: object, limit: str, remedy: str) -> None:
        self.flag = flag
        self.value = value
        self.limit = limit
        self.remedy = remedy
        shown = flag if value is None or value is True else f"{flag} {value}"
        super().__init__(f"{shown}: {limit}. {remedy}")


class FlagConflictError(ServerArgsError):
    """Two flags that exclude each other. ``other`` is the second one, as the user may type it."""

    def __init__(self, flag: str, value: object, other: str, why: str, remedy: str) -> None:
        self.other = other
        super().__init__(flag, value, f"conflicts with {other}: {why}", remedy)
