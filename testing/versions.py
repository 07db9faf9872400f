"""Marks for tests that need a certain version of what is installed."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def needs(package: str, since: str, otherwise: str) -> pytest.MarkDecorator:
    """Skip a test where a package is older.

    Args:
        since: the first version with which the test can pass.
        otherwise: what older ones do, for the reason that is printed.
    """
    installed = version(package)
    return pytest.mark.skipif(
        Version(installed) < Version(since), reason=f"{package} {installed}: {otherwise}"
    )
