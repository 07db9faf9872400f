"""A pytest plugin for the gate: runs given tests in a given order, and notes how each one ended."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

TESTS, RESULTS = "DSAT_MUTANT_TESTS", "DSAT_MUTANT_RESULTS"  # variables that name files

_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if TESTS not in os.environ:
        return
    wanted = {name: at for at, name in enumerate(json.loads(Path(os.environ[TESTS]).read_text()))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = sorted(
        (item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid]
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if RESULTS in os.environ and not hasattr(session.config, "workerinput"):
        results = {name: [seconds, name in _failed] for name, seconds in _seconds.items()}
        Path(os.environ[RESULTS]).write_text(json.dumps(results))
