"""Users, passwords and the tokens of sessions."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

from testing.master.errors import PERMISSION_DENIED, UNAUTHENTICATED, ApiError

# The salt that the clients of Determined put before a password.
_SALT = "GubPEmmotfiK9TMD6Zdw"


class Accounts:
    """Who may use the master, and as whom.

    Args:
        users: Passwords by user name.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self._passwords = {name: _hashed(password) for name, password in users.items()}
        self._sessions: dict[str, str] = {}
        self._tasks: dict[str, str] = {}

    def login(self, name: str, password: str, *, is_hashed: bool) -> str:
        """A token of a new session.

        Raises:
            ApiError: The user is unknown or the password wrong.
        """
        given = password if is_hashed else _hashed(password)
        if self._passwords.get(name) != given:
            raise ApiError(PERMISSION_DENIED, "invalid credentials")
        return self.session(name)

    def session(self, name: str) -> str:
        token = f"v2.public.{secrets.token_hex(16)}"
        self._sessions[token] = name
        return token

    def task_session(self, name: str) -> str:
        token = f"v2.public.task.{secrets.token_hex(16)}"
        self._tasks[token] = name
        return token

    def end_all_sessions(self) -> None:
        """Makes every user's cached token invalid, as after a week."""
        self._sessions.clear()

    def user_of(self, headers: Mapping[str, str]) -> str:
        """Who sent a request.

        Raises:
            ApiError: It has no valid token.
        """
        for header, known in (
            ("authorization", self._sessions),
            ("grpc-metadata-x-allocation-token", self._tasks),
        ):
            token = headers.get(header, "").removeprefix("Bearer ")
            if token in known:
                return known[token]
        raise ApiError(UNAUTHENTICATED, "invalid credentials")


def user_json(name: str) -> dict[str, object]:
    """v1User."""
    return {
        "id": 2,
        "username": name,
        "admin": False,
        "active": True,
        "agentUserGroup": None,
        "displayName": "",
        "modifiedAt": "2024-01-01T00:00:00Z",
        "remote": False,
        "lastAuthAt": None,
    }


def _hashed(password: str) -> str:
    return hashlib.sha512((_SALT + password).encode()).hexdigest() if password else ""
