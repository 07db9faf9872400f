"""Log lines of a running search."""

from __future__ import annotations

import re
from pathlib import Path

from testing.scenarios import User


def test_a_trials_line_names_the_recommended_one_but_not_during_finals(tmp_path: Path) -> None:
    user = User(tmp_path)
    user.has({"train_micro_batch_size_per_gpu": 4})
    told = user.tunes("--max-trials", 8)
    lines = re.findall(r"\[\d+/8\] (\w+): .*; recommended so far: (\w+)$", told.err, re.M)
    named = dict(lines)
    searched = [row["name"] for row in told.trials if row["kind"] != "final"]
    assert list(named) == searched and named[searched[0]] == searched[0]
    assert named[searched[-1]] in searched[1:]
