from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from dsat.prepare import installed_deepspeed


@pytest.fixture(autouse=True, scope="module")
def _without_deepspeed() -> Iterator[None]:
    """Skip validation by DeepSpeed, which is slow; `tests/prepare/test_installed_deepspeed.py`
    tests it."""
    with mock.patch.object(installed_deepspeed, "_stamp", return_value=None):
        yield
