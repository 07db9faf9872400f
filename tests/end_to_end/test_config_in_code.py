"""Scripts that no argument tells their configuration: first runs, trials, full-length runs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsat.engines.local.first_run import FirstRun
from dsat.engines.local.running import FULL_RUN_ID
from dsat.in_trial.config_injection import ZERO_INIT
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import TrialOptions
from testing.local import (
    PATIENCE_S,
    PROGRAMS,
    Bench,
    bench_of,
    processes_of,
    read_json,
    warnings_of,
)

pytestmark = pytest.mark.slow

OPTIONS = TrialOptions(timeout_s=PATIENCE_S, warm_up_s=0.0, measured_s=0.0)
WAYS = ("path", "args", "positional", "config_params")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of(
        "in_code", tmp_path_factory.mktemp("single"), own_micro_batch=3, imported=True
    ) as bench:
        yield bench


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of(
        "in_code", tmp_path_factory.mktemp("pair"), slots_per_trial=2, imported=True
    ) as bench:
        yield bench


@pytest.mark.parametrize("way", WAYS)
def test_a_trial_is_measured_with_its_own_configuration(single: Bench, way: str) -> None:
    trial = single.trial(way, micro_batch=5, gas=2, stage=2)
    outcome = single.run(trial)
    assert outcome.ok, single.log(trial)
    assert warnings_of(outcome) == ()


def test_a_data_loader_of_the_scripts_own_size_is_found_out(single: Bench) -> None:
    trial = single.trial("loader before", micro_batch=5)
    outcome = single.run(trial)
    assert outcome.kind is OutcomeKind.INVALID, single.log(trial)
    assert "feeds 3 samples, its own micro batch" in outcome.message
    trial = single.trial("loader before", micro_batch=3)
    assert single.run(trial).ok, "it is the trial's own, too"


def test_on_two_ranks(pair: Bench) -> None:
    trial = pair.trial("dict", micro_batch=5, stage=1)
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    assert warnings_of(outcome) == ()


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_model_that_is_partitioned_while_it_is_made(pair: Bench, stage: int) -> None:
    trial = pair.trial("zero init", micro_batch=5, stage=stage)
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    assert warnings_of(outcome) == ((ZERO_INIT,) if stage < 3 else ())


def test_the_full_length_run_uses_it_too(single: Bench) -> None:
    folder = single.engine.train(single.trial("dict", micro_batch=5, gas=2, stage=1))
    [(trial_id, outcome)] = single.engine.poll(PATIENCE_S)
    assert trial_id == FULL_RUN_ID and outcome.ok, (folder / "stderr.log").read_text()
    assert read_json(folder / "facts0.json") == {
        "micro_batch": 5,
        "gas": 2,
        "stage": 1,
        "clipping": 1.0,
        "fed": 5,
        "steps": 100,
    }


def test_a_first_run_learns_it_and_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "work"
    shutil.copytree(PROGRAMS / "in_code", place)
    (tmp_path / "way").write_text("positional")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = FirstRun(
        [sys.executable, "train.py"], place, timeout_s=PATIENCE_S, options=OPTIONS, ranks=1
    )
    try:
        [rank] = run.ranks()
        assert rank.config == read_json(place / "own.json")
        while (outcome := run.poll(1.0)) is None:
            pass
    finally:
        run.close(keep_files=True)
    assert outcome.ok, (run.folder / "stderr.log").read_text()
    assert outcome.metrics is not None and outcome.metrics.num_steps >= 5
    assert outcome.profile is not None and outcome.profile.num_params > 0
    (tmp_path / "run").mkdir()
    run.move_to(tmp_path / "run" / "trials" / "own")
    left = {path.name for path in (tmp_path / "run" / "trials" / "own").iterdir()}
    assert {"cmd.txt", "stdout.log", "stderr.log", "metrics.json", "modules.json"} <= left
    assert not {"records", "hook", "packages"} & left, "records hold variables"
    assert not processes_of(run.folder) and not run.folder.exists()
