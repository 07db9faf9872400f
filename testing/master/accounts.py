"""Users, passwords and session tokens."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

from testing.master.errors import PERMISSION_DENIED, UNAUTHENTICATED, ApiError

# The salt that the clients of Determined put before a password.
_SALT = "GubPEmmotfiK9TMD6Zdw"


class Accounts:
    """The master's users with their passwords and sessions."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._sessions: dict[str, str] = {}
        self._tasks: dict[str, str] = {}

    def login(self, name: str, hashed: str) -> str:
        """Return the token of a new session.

        Raises:
            ApiError: The user is unknown or the password wrong.
        """
        password = self._users.get(name)
        if password is None or hashlib.sha512((_SALT + password).encode()).hexdigest() != hashed:
            raise ApiError(PERMISSION_DENIED, "invalid credentials")
        return self.session(name)

    def session(self, name: str) -> str:
        return _token_in(self._sessions, name)

    def task_session(self, name: str) -> str:
        return _token_in(self._tasks, name)

    def user_of(self, headers: Mapping[str, str]) -> str:
        """Return the sender of a request.

        Raises:
            ApiError: It has no valid token.
        """
        token = headers.get("authorization", "").removeprefix("Bearer ")
        task = headers.get("grpc-metadata-x-allocation-token", "").removeprefix("Bearer ")
        user = self._sessions.get(token) or self._tasks.get(task)
        if user is None:
            raise ApiError(UNAUTHENTICATED, "invalid credentials")
        return user


def _token_in(tokens: dict[str, str], name: str) -> str:
    token = f"v2.public.{secrets.token_hex(16)}"
    tokens[token] = name
    return token
