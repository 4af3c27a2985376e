"""Errors as clients see them: a status and OpenAI's shape
`{"error": {message, type, param, code}}`."""

from typing import Any

from tandem.errors import (
    CapacityError,
    DrainingError,
    EngineDeadError,
    RequestError,
    TandemError,
    TransferError,
)
from tandem.log import get_logger

log = get_logger(__name__)

CONTEXT_LENGTH = "context_length_exceeded"
DRAINING = "draining"


class ApiError(TandemError):
    """A reply that is an error. `code` is a word for programs, `param` the field at fault."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def headers(self) -> dict[str, str]:
        """Whoever is told that a server cannot now is told when to ask again."""
        return {"retry-after": "1"} if self.status == 503 else {}

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def as_api_error(error: BaseException) -> ApiError:
    """The reply for an error. What no class of tandem.errors covers is our bug: logged, 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(str(error), param=error.param)
    if isinstance(error, CapacityError):
        return ApiError(str(error), status=503, code="over_capacity")
    if isinstance(error, DrainingError):
        return ApiError(str(error), status=503, code=DRAINING)
    if isinstance(error, EngineDeadError | TransferError):
        return ApiError(str(error), status=503, code="engine_unavailable")
    if isinstance(error, TandemError):
        return ApiError(str(error), status=500, code="internal_error")
    log.error("a request failed by a fault of the server", exc_info=error)
    return ApiError("internal error; the server's log says more", status=500, code="internal_error")
