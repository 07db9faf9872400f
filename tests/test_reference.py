"""Parts of the documentation made from the code, and the examples in the page on Python."""

from __future__ import annotations

import argparse
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

import dsat
from dsat.cli.parser import build_parser
from dsat.engines.places import ENGINE_NAMES
from dsat.search import SEARCHES, RandomSearch
from dsat.tuning import local
from testing import reference, warm_command, warm_host
from testing.local import PROGRAMS, processes_of


def test_the_references_are_as_declared_and_have_every_flag_of_the_parser() -> None:
    for page, made in reference.references().items():
        written = page.read_text(encoding="utf-8").partition(reference.MARK)[2]
        assert written == made, "run `python -m testing.reference`"
    listed = reference.option_reference()
    commands = next(a for a in build_parser()._actions if a.dest == "command_name").choices
    assert isinstance(commands, dict)
    for parser in commands.values():
        for action in parser._actions:
            if action.option_strings and action.help != argparse.SUPPRESS and action.dest != "help":
                value = "" if action.nargs == 0 or not action.metavar else f" {action.metavar}"
                assert f"`{action.option_strings[-1]}{value}`" in listed.replace("\\|", "|")
    assert all(f"`{name}`" in listed for name in ENGINE_NAMES)


@pytest.mark.slow
def test_the_examples_in_python_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(PROGRAMS / "tiny", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    # Short trials on one slot; only `dsat.estimate` simulates their memory.
    steps: dict[str, Any] = {
        "start_profile_step": 2,
        "end_profile_step": 3,
        "max_measured_steps": 2,
    }
    small: dict[str, Any] = {"devices": 1, "max_micro_batch": 64, "memory_model": "formula"}
    quick = functools.partial(dsat.tune, **small, **steps)
    monkeypatch.setattr(dsat, "tune", quick)
    names: dict[str, Any] = {"__name__": "examples"}
    try:
        for number, example in enumerate(reference.python_examples()):
            exec(compile(example, f"example {number}", "exec"), names)
    finally:
        for name in ("patient", "strategies"):
            SEARCHES.pop(name, None)
        local.ENGINES.pop("computed", None)
    result, again, run = names["result"], names["again"], names["run"]
    assert result.run_dir == Path("dsat_runs/tiny-1").absolute()
    assert [trial["kind"] for trial in result.trials[:2]] == ["baseline", "profile"]
    assert len(result.trials) == 6 and result.best["outcome"] == "OK"
    assert names["config"] == result.best_config
    assert "train_micro_batch_size_per_gpu" in result.best_config
    more = {trial["name"] for trial in again.trials[6:]}
    assert more and {row["name"] for row in names["rows"]} == more
    assert again.trials[:6] == result.trials
    assert (run.best, run.trials) == (again.best, again.trials)
    assert issubclass(names["Patient"], RandomSearch)
    said = capsys.readouterr().out
    assert "Use z" in said or "Keep your configuration" in said
    assert "stage 1" in said
    assert processes_of(tmp_path) == []
