from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_deepspeed(unchecked_configurations: None) -> None:
    """No scenario waits for DeepSpeed; `tests/prepare/test_installed_deepspeed.py` asks it."""
