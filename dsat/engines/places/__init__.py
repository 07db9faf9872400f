"""Places where hosts come from, by their names in `--engine`.

To add a place, write a module with the functions of a `Provider`, and list it in `PROVIDERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.engines.places import local, ray, slurm, ssh
from dsat.engines.places.base import Environment, Provider
from dsat.errors import UserInputError
from dsat.options import Option

# In the order in which `--engine auto` asks them.
PROVIDERS = {
    "ssh": Provider(ssh.detect, ssh.acquire),
    "ray": Provider(ray.detect, ray.acquire, ray.OPTIONS),
    "slurm": Provider(slurm.detect, slurm.acquire),
    "local": Provider(local.detect, local.acquire),
}
AUTO = "auto"
ENGINE_NAMES = (AUTO, *PROVIDERS, "determined")


def options() -> list[Option]:
    """Return the options of all places."""
    return [option for provider in PROVIDERS.values() for option in provider.options]


def given_options(values: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Return the user's values of the places' options, by keyword.

    Raises:
        UserInputError: an option does not belong to the place that `engine` names.
    """
    user_options = [option for option in options() if values.get(option.keyword) is not None]
    own_options = PROVIDERS[engine].options if engine in PROVIDERS else ()
    for option in user_options:
        if option not in own_options:
            fitting = [name for name, provider in PROVIDERS.items() if option in provider.options]
            raise UserInputError(f"{option.flags[-1]} goes with --engine {' or '.join(fitting)}")
    return {option.keyword: values[option.keyword] for option in user_options}


def detect(environment: Environment) -> str:
    """Return the name of the first place whose `detect` returns True."""
    return next(name for name, provider in PROVIDERS.items() if provider.detect(environment))
