"""Marks for tests that need a certain version of a package."""

from __future__ import annotations

from importlib.metadata import version

import pytest
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


of_closed_form = needs(
    "deepspeed", "0.19.8", "allocates otherwise than the closed form was read from"
)
