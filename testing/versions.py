"""Marks for tests that not all versions of a package can pass."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version


def needs(package: str, since: str, otherwise: str) -> pytest.MarkDecorator:
    """Skip a test if a package is older than `since`.

    Args:
        since: the first version with which the test can pass.
        otherwise: what older versions do, for the printed reason.
    """
    installed = version(package)
    return pytest.mark.skipif(
        Version(installed) < Version(since), reason=f"{package} {installed}: {otherwise}"
    )


def broken(package: str, versions: str, fault: str) -> pytest.MarkDecorator:
    """Skip a test if the installed version of a package has a fault.

    Args:
        versions: the versions with the fault, as a specifier.
        fault: what they do, for the printed reason.
    """
    installed = version(package)
    return pytest.mark.skipif(
        Version(installed) in SpecifierSet(versions), reason=f"{package} {installed}: {fault}"
    )


of_closed_form = needs(
    "deepspeed", "0.19.8", "allocates otherwise than the closed form was read from"
)
