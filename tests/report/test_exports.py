"""A run in the form of other tools, opened by the tools themselves."""

from __future__ import annotations

import os
import resource
import sys
import warnings
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from dsat.errors import DsatError, UserInputError
from dsat.report import exports
from dsat.tuning.journal import FILE_NAME
from dsat.tuning.run import Run, read_run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.made_up_runs import Steady, events_of_world, write_run

ENDED_AT_S = 1.8e9
NASTY = '=HYPERLINK(1)\n"quoted", \U0001f600'


class Nasty(Steady):
    def outcome(self, trial: Trial) -> Outcome:
        found = super().outcome(trial)
        if found.ok:
            return replace(found, step_ms=(10.0, 11.0, 12.0))
        return replace(found, message=NASTY)


@pytest.fixture(scope="module")
def run() -> Run:
    events = events_of_world(Nasty(), method="random", finals=None, trials=60)
    for number, event in enumerate(events):  # of a run that was paused for days
        event["time_s"] = ENDED_AT_S + 1e5 * number
    return Run(events)


def exported(run: Run, to: str, folder: Path) -> Path:
    path = folder / f"out.{to}"
    exports.export(run, to, path, "model-1")
    return path


def compared(run: Run) -> list[Trial]:
    """Trials that are over, but for the profile."""
    return [t for t in run.trials.values() if t.id in run.outcomes and t.kind.value != "profile"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_a_table_is_read_by_pandas(run: Run, tmp_path: Path, to: str) -> None:
    import pandas

    read = pandas.read_csv if to == "csv" else pandas.read_parquet
    table = read(exported(run, to, tmp_path))
    assert list(table["name"]) == [trial.name for trial in run.trials.values()]
    assert run.best is not None
    assert list(table["name"][table["is_best"]]) == [run.best.name]
    best = table[table["name"] == run.best.name].iloc[0]
    assert best["config.train_micro_batch_size_per_gpu"] == run.best.batch.micro_batch
    own = run.outcomes[run.best.id].metrics
    assert own is not None and best["metrics.throughput"] == own.throughput
    lost = table[table["outcome"] == "OOM"]
    assert len(lost) == sum(o.kind.value == "OOM" for o in run.outcomes.values()) > 0
    said = f"'{NASTY}" if to == "csv" else NASTY  # a spreadsheet must not take it for a formula
    assert set(lost["message"]) == {said}


@pytest.mark.slow
def test_a_study_is_read_by_optuna(run: Run, tmp_path: Path) -> None:
    import optuna

    path = exported(run, "optuna", tmp_path)
    study = optuna.load_study(study_name="model-1", storage=f"sqlite:///{path}")
    trials = {trial.user_attrs["name"]: trial for trial in study.trials}
    assert len(study.trials) == len(compared(run))
    for trial in compared(run):
        ran = run.outcomes[trial.id].ok
        state = optuna.trial.TrialState.COMPLETE if ran else optuna.trial.TrialState.FAIL
        assert trials[trial.name].state is state
        assert trials[trial.name].value == run.value(trial)
    best = max(filter(None, (run.value(trial) for trial in compared(run))))
    assert study.best_value == best
    by_stage: dict[int, dict[str, object]] = {stage: {} for stage in range(4)}
    for trial in compared(run):
        by_stage[trial.stage].update(trials[trial.name].params)
    assert "reduce_bucket_size" in by_stage[1] and "reduce_bucket_size" not in by_stage[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental, and needs no scikit-learn
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
    assert importances["train_micro_batch_size_per_gpu"] > 0
    attrs = study.user_attrs
    assert attrs["verdict"].startswith("Gain") and attrs["best_value"] == run.best_value
    assert [name for name, trial in trials.items() if trial.user_attrs["is_best"]] == [
        run.best.name if run.best else None
    ]
    assert {t.name: datetime.fromtimestamp(run.ended_at_s[t.id] or 0.0) for t in compared(run)} == {
        name: trial.datetime_complete for name, trial in trials.items()
    }


def test_a_journal_without_dates_is_dated_by_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    without = write_run(folder, trials=10)
    os.utime(folder / FILE_NAME, (ENDED_AT_S, ENDED_AT_S))
    found = read_run(folder / FILE_NAME).ended_at_s
    began_s = ENDED_AT_S - without.running_s
    assert found == {number: began_s + ended_s for number, ended_s in without.ended_s.items()}


@pytest.mark.slow
def test_events_are_read_by_tensorboard(run: Run, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder = exported(run, "tensorboard", tmp_path)
        assert {path.name for path in folder.iterdir()} == {t.name for t in compared(run)}
        assert run.best is not None
        read = EventAccumulator(str(folder / run.best.name)).Reload()
        steps = [event.value for event in read.Scalars("step_ms")]
        [value] = [event.value for event in read.Scalars("throughput")]
    assert steps == [10.0, 11.0, 12.0]
    assert value == pytest.approx(run.value(run.best), rel=1e-6)


@pytest.mark.nightly
def test_runs_are_read_by_mlflow(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `make setup` installs it beside the environment.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "mlflow")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mlflow's own imports
        from mlflow.tracking import MlflowClient

        path = exported(run, "mlflow", tmp_path)
        client = MlflowClient(tracking_uri=f"sqlite:///{path}")
        experiment = client.get_experiment_by_name("model-1")
        assert experiment is not None
        found = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    assert experiment.tags["best_value"] == str(run.best_value)
    assert len(found) == len(compared(run))
    for trial in compared(run):
        ran = run.outcomes[trial.id].ok
        assert found[trial.name].info.status == ("FINISHED" if ran else "FAILED")
        assert found[trial.name].data.metrics.get("throughput") == run.value(trial)
        assert found[trial.name].data.tags["is_best"] == str(trial is run.best)
        assert found[trial.name].data.params["strategy"] == trial.strategy


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    path = exported(run, "csv", tmp_path)
    with pytest.raises(UserInputError, match="exists already"):
        exported(run, "csv", tmp_path)
    assert path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["csv", pytest.param("optuna", marks=pytest.mark.slow)])
def test_a_full_disk_leaves_nothing_and_is_named_by_the_file(
    run: Run, tmp_path: Path, to: str
) -> None:
    """Here a limit on the size of files."""
    path = tmp_path / f"out.{to}"
    soft, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises((OSError, DsatError), match=f"{path}") as found:
            exported(run, to, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, most))
    assert "None" not in str(found.value) and not [*tmp_path.iterdir()]


def test_a_tool_that_is_missing_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserInputError, match=r"--to parquet: needs pyarrow.*pip install pyarrow"):
        exported(run, "parquet", tmp_path)
