"""The examples of the page on Python run as they stand."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

import dsat
from dsat.search import SEARCHES, RandomSearch
from testing import reference, warm_command, warm_host
from testing.local import PROGRAMS, processes_of


@pytest.mark.slow
def test_the_examples_in_python_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(PROGRAMS / "tiny", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    # Short trials on one slot, whose memory `dsat.estimate` alone simulates.
    steps = {"start_profile_step": 2, "end_profile_step": 3, "max_profile_steps": 2}
    small = {"slots": 1, "max_micro_batch": 64, "memory_model": "formula"}
    quick = functools.partial(dsat.tune, **small, **steps)
    monkeypatch.setattr(dsat, "tune", quick)
    names: dict[str, Any] = {"__name__": "examples"}
    try:
        for number, example in enumerate(reference.python_examples()):
            exec(compile(example, f"example {number}", "exec"), names)
    finally:
        SEARCHES.pop("patient", None)
    result, again, run = names["result"], names["again"], names["run"]
    assert result.run_dir == Path("dsat_runs/tiny-1")
    assert [trial["kind"] for trial in result.trials[:2]] == ["baseline", "profile"]
    assert len(result.trials) == 6 and result.best["outcome"] == "OK"
    assert names["config"] == result.best_config
    assert "train_micro_batch_size_per_gpu" in result.best_config
    assert [row["name"] for row in names["rows"]] == [again.trials[-1]["name"]]
    assert again.trials[:6] == result.trials
    assert (run.best, run.trials) == (again.best, again.trials)
    assert issubclass(names["Patient"], RandomSearch)
    said = capsys.readouterr().out
    assert "Use z" in said or "Keep your configuration" in said
    assert "stage 1" in said
    assert processes_of(tmp_path) == []
