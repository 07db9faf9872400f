"""Packages that trials and simulations need, as dsat's own metadata name them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.requirements import Requirement

from dsat.errors import UserInputError

_EXTRA = "deepspeed"  # torch and DeepSpeed are no dependencies: they are the user's own
TRAINING = ("torch", "deepspeed")


def requirements() -> list[Requirement]:
    """Return the packages that trials need, dsat's own dependencies among them."""
    try:
        named = importlib.metadata.requires("dsat") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from a folder
        named = list(TRAINING)
    required = map(Requirement, named)
    return [r for r in required if r.marker is None or r.marker.evaluate({"extra": _EXTRA})]


def version(name: str) -> str | None:
    """Return the installed version of a package; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def command_for(requirement: Requirement) -> str:
    """Return the command that installs a package."""
    return f"pip install '{requirement.name}{requirement.specifier}'"


def check() -> None:
    """Check that torch and DeepSpeed are in this environment, in versions that trials work with.

    Raises:
        UserInputError: they are not.
    """
    unfit = sorted(_unfit(), key=lambda pair: TRAINING.index(pair[0].name))
    if unfit:
        wanted = " ".join(f"'{each.name}{each.specifier}'" for each, _ in unfit)
        raise UserInputError(
            " and ".join(problem for _, problem in unfit),
            where="environment",
            hint=f"Run pip install {wanted}, or install dsat in the environment that you train in. "
            "`dsat doctor` checks everything.",
        )


def _unfit() -> Iterator[tuple[Requirement, str]]:
    for each in requirements():
        found = version(each.name)
        if each.name not in TRAINING:
            continue
        if found is None:
            yield each, f"{each.name} is not installed"
        elif not each.specifier.contains(found, prereleases=True):
            yield each, f"{each.name} {found} is installed, and dsat needs {each.specifier}"
