"""Choice of the Determined master whose cluster runs the trials, or of none."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from dsat.engines.places import PROVIDERS
from dsat.values.files import home

NOT_CONFIGURED = "no Determined master is configured"
_MASTER_VARIABLES = ("DET_MASTER", "DET_MASTER_ADDR")
_DEFAULT_HOSTS = ("localhost:8080", "127.0.0.1:8080")


@dataclass(frozen=True)
class Choice:
    """Address of the master (None without one), and the reason for the choice."""

    master: str | None
    reason: str


def choose(engine: str) -> Choice:
    """Choose a master by `--engine`, then by determined's variables and logins."""
    if engine in PROVIDERS:
        return Choice(None, f"--engine {engine}")
    configured = _find_configured()
    if engine == "determined":
        return Choice(configured.master or _DEFAULT_HOSTS[0], "--engine determined")
    return configured


def _find_configured() -> Choice:
    for variable in _MASTER_VARIABLES:
        if master := os.environ.get(variable):
            return Choice(master, f"{variable} is set")
    logins = _logins()
    nearby = tuple(f"//{host}" for host in _DEFAULT_HOSTS)
    elsewhere = [master for master in logins if not master.endswith(nearby)]
    if len(elsewhere) > 1:
        return Choice(
            None, f"there are logins at {' and '.join(elsewhere)}; DET_MASTER chooses a master"
        )
    if elsewhere:
        return Choice(elsewhere[0], f"`det user login` of {logins[elsewhere[0]]}")
    if logins:  # every test installation has one
        return Choice(None, f"for the login at {min(logins)}, use --engine determined")
    return Choice(None, NOT_CONFIGURED)


def _logins() -> dict[str, str]:
    """Return the logged-in user by master, from determined's own file; empty if unreadable."""
    try:
        masters = json.loads(auth_file().read_text(encoding="utf-8")).get("masters", {})
        return {
            str(master): str(entry["active_user"])
            for master, entry in masters.items()
            if entry.get("active_user") in entry.get("tokens", {})
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def auth_file() -> Path:
    """Return determined's file of logins on Linux (`determined.common.util.get_config_path`)."""
    if debug := os.environ.get("DET_DEBUG_CONFIG_PATH"):
        return Path(debug, "auth.json")
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else home() / ".config") / "determined" / "auth.json"
