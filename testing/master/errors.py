"""Refusals of the master: a gRPC code and its HTTP status."""

from __future__ import annotations

INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED = 3, 5, 7
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL, UNAUTHENTICATED = 9, 12, 13, 16

_HTTP_STATUS = {
    INVALID_ARGUMENT: 400,
    NOT_FOUND: 404,
    PERMISSION_DENIED: 403,
    FAILED_PRECONDITION: 400,
    UNIMPLEMENTED: 501,
    INTERNAL: 500,
    UNAUTHENTICATED: 401,
}
_REASON = {
    INVALID_ARGUMENT: "InvalidArgument",
    NOT_FOUND: "NotFound",
    PERMISSION_DENIED: "PermissionDenied",
    FAILED_PRECONDITION: "FailedPrecondition",
    UNIMPLEMENTED: "Unimplemented",
    INTERNAL: "Internal",
    UNAUTHENTICATED: "Unauthenticated",
}


class ApiError(Exception):
    """A request that is refused.

    Args:
        code: The gRPC code.
        message: What the client shows its user.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def status(self) -> int:
        return _HTTP_STATUS[self.code]

    def body(self) -> dict[str, object]:
        return {
            "error": {"code": self.code, "reason": _REASON[self.code], "error": str(self)},
        }


def not_found(message: str) -> ApiError:
    return ApiError(NOT_FOUND, message)


def invalid(message: str) -> ApiError:
    return ApiError(INVALID_ARGUMENT, message)
