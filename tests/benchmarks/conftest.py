"""What tests of the benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks.tables import Table
from tests.benchmarks.made_up_table import made_up_table


@pytest.fixture(scope="module")
def table() -> Table:
    """Answers come from it in each test of a file."""
    return made_up_table()
