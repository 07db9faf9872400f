from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from dsat.prepare import installed_deepspeed


@pytest.fixture(autouse=True, scope="module")
def _without_deepspeed() -> Iterator[None]:
    """No scenario waits for DeepSpeed; `tests/prepare/test_installed_deepspeed.py` asks it."""
    with mock.patch.object(installed_deepspeed, "_stamp", return_value=None):
        yield
