"""A run in the form of other tools, each imported only when it is asked for."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsat.errors import UserInputError
from dsat.report.page_rows import flat
from dsat.report.run_view import RunView
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind

if TYPE_CHECKING:
    import optuna

_MOST_TEXT = 2000  # of a message: databases have limits


def rows(run: Run) -> list[dict[str, Any]]:
    """Return a flat row of text, numbers and None for each trial.

    Settings are `config.KEY`, measurements `metrics.KEY`.
    """
    found = []
    for view in RunView.of(run).trials:
        trial, outcome, told = view.trial, view.outcome, view.to_json()
        row = {key: told[key] for key in told if key not in ("overrides", "script_args", "metrics")}
        row["took_s"] = None if outcome is None else outcome.duration_s
        row["ended_s"] = view.ended_s
        row["message"] = row["message"][:_MOST_TEXT]
        row |= {f"config.{key}": _plain(value) for key, value in flat(trial.overrides).items()}
        row |= {f"script.{key}": _plain(value) for key, value in trial.script_args.items()}
        row |= {f"metrics.{key}": value for key, value in (told["metrics"] or {}).items()}
        found.append(row)
    return found


def to_csv(run: Run, output: Path, name: str, ended_at_s: float) -> None:
    """A table with a line for each trial."""
    table = rows(run)
    with open(output, "x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _columns(table))
        writer.writeheader()
        writer.writerows({key: _harmless(value) for key, value in row.items()} for row in table)


def to_parquet(run: Run, output: Path, name: str, ended_at_s: float) -> None:
    """The same table in columns; settings whose values are of several types as text."""
    import pyarrow
    import pyarrow.parquet

    table = rows(run)
    columns = {key: [row.get(key) for row in table] for key in _columns(table)}
    arrays = {
        key: values if len({type(v) for v in values if v is not None}) <= 1 else _as_text(values)
        for key, values in columns.items()
    }
    pyarrow.parquet.write_table(pyarrow.table(arrays), output)


def to_optuna(run: Run, output: Path, name: str, ended_at_s: float) -> None:
    """Write one study into a SQLite storage.

    A trial that did not run is a failed one; a setting that a strategy does not have is no
    parameter of its trials.
    """
    import optuna

    assert run.plan is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    smaller = run.plan.objective.smaller_is_better
    study = optuna.create_study(
        storage=f"sqlite:///{output}",
        study_name=name,
        direction="minimize" if smaller else "maximize",
    )
    study.set_user_attr("metric", run.plan.metric)
    for key, value in run.info.items():
        study.set_user_attr(str(key), str(value)[:_MOST_TEXT])
    distributions = _distributions(run)
    for trial, outcome in _ended(run):
        params = {key: value for key, value in _params(trial).items() if key in distributions}
        value = run.value(trial)
        frozen = optuna.trial.create_trial(
            state=_state(value),
            value=value,
            params=params,
            distributions={key: distributions[key] for key in params},
            user_attrs={
                "name": trial.name,
                "kind": trial.kind.value,
                "outcome": outcome.kind.value,
                "message": outcome.message[:_MOST_TEXT],
                **({} if outcome.metrics is None else outcome.metrics.to_json()),
            },
        )
        ended = ended_at_s - run.running_s + run.ended_s[trial.id]
        frozen.datetime_complete = datetime.datetime.fromtimestamp(ended)
        begin = datetime.timedelta(seconds=outcome.duration_s)
        frozen.datetime_start = frozen.datetime_complete - begin
        study.add_trial(frozen)


def to_mlflow(run: Run, output: Path, name: str, ended_at_s: float) -> None:
    """A tracking store in SQLite with one experiment, a run of MLflow's for each trial."""
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{output}")
    experiment = client.create_experiment(name, artifact_location=output.parent.as_uri())
    for trial, outcome in _ended(run):
        ended = ended_at_s - run.running_s + run.ended_s[trial.id]
        ended_ms = round(1000 * ended)
        created = client.create_run(
            experiment,
            start_time=ended_ms - round(1000 * outcome.duration_s),
            run_name=trial.name,
            tags={"kind": trial.kind.value, "outcome": outcome.kind.value},
        ).info.run_id
        metrics = {} if outcome.metrics is None else outcome.metrics.to_json()
        client.log_batch(
            created,
            metrics=[
                Metric(key, float(value), ended_ms, 0)
                for key, value in metrics.items()
                if value is not None
            ],
            params=[Param(key, str(value)) for key, value in _params(trial).items()],
            tags=[RunTag("message", outcome.message[:_MOST_TEXT])] if outcome.message else [],
        )
        status = "FINISHED" if outcome.ok else "FAILED"
        client.set_terminated(created, status=status, end_time=ended_ms)


def to_tensorboard(run: Run, output: Path, name: str, ended_at_s: float) -> None:
    """Write a folder of event files, a run for each trial.

    It has the trial's settings (the HPARAMS tab) and the times of its steps.
    """
    from torch.utils.tensorboard import SummaryWriter

    assert run.plan is not None
    for trial, outcome in _ended(run):
        ended = ended_at_s - run.running_s + run.ended_s[trial.id]
        value = run.value(trial)
        measured = {} if value is None else {run.plan.metric: value}
        params = {**_params(trial), "outcome": outcome.kind.value}
        with SummaryWriter(str(output / trial.name)) as writer:
            writer.add_hparams(params, measured, run_name=".", global_step=0)
            for number, step_ms in enumerate(outcome.step_ms, start=1):
                writer.add_scalar("step_ms", step_ms, number, walltime=ended)


Exporter = Callable[[Run, Path, str, float], None]
# By the words of `--to`: what writes it, how a file or folder of it ends, and what to install.
EXPORTERS: Mapping[str, tuple[Exporter, str, str]] = {
    "optuna": (to_optuna, ".optuna.db", "optuna"),
    "mlflow": (to_mlflow, ".mlflow.db", "mlflow"),
    "tensorboard": (to_tensorboard, ".tensorboard", "tensorboard"),
    "csv": (to_csv, ".csv", ""),
    "parquet": (to_parquet, ".parquet", "pyarrow"),
}


def export(run: Run, to: str, output: Path, name: str, ended_at_s: float) -> None:
    """Writes a run for another tool.

    Args:
        run: what to write.
        to: a name of `EXPORTERS`.
        output: file or folder to make.
        name: of the study or experiment.
        ended_at_s: when something last happened in the run, in seconds since the epoch.

    Raises:
        UserInputError: `output` exists, or the tool is not installed.
    """
    write, _, package = EXPORTERS[to]
    if output.exists():
        raise UserInputError(
            "exists already", where=str(output), hint="Name another one with --output."
        )
    try:
        write(run, output.resolve(), name, ended_at_s)
    except ImportError as error:
        raise UserInputError(
            f"needs {package}: {error}", where=f"--to {to}", hint=f"pip install {package}"
        ) from None


def _ended(run: Run) -> Iterator[tuple[Trial, Outcome]]:
    """The trials that are over, the profile left out, which is not for comparing."""
    for trial_id, outcome in run.outcomes.items():
        trial = run.trials[trial_id]
        if trial.kind is not TrialKind.PROFILE:
            yield trial, outcome


def _params(trial: Trial) -> dict[str, Any]:
    """Settings of a trial; the global batch, which follows, is left out."""
    found = {
        key.removeprefix("zero_optimization."): _plain(value)
        for key, value in {**flat(trial.overrides), **trial.script_args}.items()
        if key != "train_batch_size"
    }
    return {"strategy": trial.strategy, **found}


def _distributions(run: Run) -> dict[str, optuna.distributions.BaseDistribution]:
    """All values tried of each setting; numbers of samples and of steps are ranges."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    values: dict[str, list[Any]] = {}
    for trial, _ in _ended(run):
        for key, value in _params(trial).items():
            values.setdefault(key, []).append(value)
    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for key, tried in values.items():
        if key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            found[key] = IntDistribution(min(tried), max(tried), log=True)
        else:
            found[key] = CategoricalDistribution(tuple(dict.fromkeys(tried)))
    return found


def _state(value: float | None) -> optuna.trial.TrialState:
    from optuna.trial import TrialState

    return TrialState.FAIL if value is None else TrialState.COMPLETE


def _columns(table: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in table for key in row))


def _plain(value: Any) -> Any:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else json.dumps(value)


def _as_text(values: list[Any]) -> list[str | None]:
    return [None if value is None else str(value) for value in values]


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula is marked as text (OWASP, CSV injection)."""
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
    return f"'{value}" if is_formula else value
