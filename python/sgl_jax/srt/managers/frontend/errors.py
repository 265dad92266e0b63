"""The one error that the front end turns into an HTTP answer."""

from __future__ import annotations


class RequestError(Exception):
    """A request that is refused or ends badly. ``status`` is the HTTP status, ``param`` the field at fault.

    The message names field, value, limit and, where there is one, the flag that raises the limit.
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        super().__init__(message)

    @property
    def kind(self) -> str:
        """OpenAI's error type for the status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 404:
            return "not_found_error"
        if self.status in (429, 503):
            return "overloaded_error" if self.status == 503 else "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, object]:
        """OpenAI's nested form."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code or self.status,
            }
        }
