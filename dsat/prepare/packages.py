"""Packages that trials and simulations need, from dsat's metadata."""

from __future__ import annotations

import functools
import importlib.metadata

from packaging.requirements import Requirement

from dsat.errors import UserInputError

DISTRIBUTION = "deepspeed-autotune"
_EXTRA = "deepspeed"  # torch and DeepSpeed are optional: users install their own
TRAINING = ("torch", "deepspeed")


def requirements() -> tuple[Requirement, ...]:
    """Return the packages that trials need; without dsat's metadata, only torch and DeepSpeed."""
    try:
        named = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # dsat runs from its source
        named = list(TRAINING)
    return _parse(tuple(named))


@functools.cache
def _parse(named: tuple[str, ...]) -> tuple[Requirement, ...]:
    required = map(Requirement, named)
    return tuple(r for r in required if r.marker is None or r.marker.evaluate({"extra": _EXTRA}))


@functools.cache
def version(name: str) -> str | None:
    """Return the installed version of a package; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(also: str | None = None) -> None:
    """Raise UserInputError unless supported versions of torch and DeepSpeed are installed.

    `also` names a further package, of which any version suffices.
    """
    needed = {each.name: each.specifier for each in requirements()}
    problems = {}
    if also is not None and version(also) is None:
        problems[also] = f"{also} is not installed"
    for name in TRAINING:
        found = version(name)
        if found is None:
            problems[name] = f"{name} is not installed"
        elif not needed[name].contains(found, prereleases=True):
            problems[name] = f"{name} {found} is installed, but dsat needs {needed[name]}"
    if problems:
        wanted = " ".join(f"'{name}{needed.get(name, '')}'" for name in problems)
        raise UserInputError(
            " and ".join(problems.values()),
            where="environment",
            hint=f"Run pip install {wanted}, or install dsat in your training environment. "
            "`dsat doctor` checks everything.",
        )
