"""Errors with which the master refuses requests: a gRPC code with its HTTP status and name."""

from __future__ import annotations

INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED = 3, 5, 7
FAILED_PRECONDITION, INTERNAL, UNAUTHENTICATED = 9, 13, 16

_ANSWERS = {
    INVALID_ARGUMENT: (400, "InvalidArgument"),
    NOT_FOUND: (404, "NotFound"),
    PERMISSION_DENIED: (403, "PermissionDenied"),
    FAILED_PRECONDITION: (400, "FailedPrecondition"),
    INTERNAL: (500, "Internal"),
    UNAUTHENTICATED: (401, "Unauthenticated"),
}


class ApiError(Exception):
    """A refused request.

    Args:
        code: The gRPC code.
        message: What the client shows its user.
        status: The HTTP status, if it differs from the code's usual one.
    """

    def __init__(self, code: int, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status or _ANSWERS[code][0]
        self.body = {"error": {"code": code, "reason": _ANSWERS[code][1], "error": message}}


def not_found(message: str) -> ApiError:
    return ApiError(NOT_FOUND, message)


def invalid(message: str) -> ApiError:
    return ApiError(INVALID_ARGUMENT, message)
