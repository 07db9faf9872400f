"""Exports of a run to other tools, which are imported only when they are used."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsat.command.ds_config import flat
from dsat.errors import DsatError, UserInputError
from dsat.values.files import written_atomically
from dsat.values.outcome import Outcome
from dsat.values.text import hide_secrets_in_values
from dsat.values.trial import TrialKind

if TYPE_CHECKING:
    import optuna

    from dsat.show.view import RunView, TrialView

_MOST_TEXT = 2000  # characters of a text, because databases have limits
_DATABASES = ("mlflow", "optuna", "sqlalchemy")  # packages that raise the errors of databases


def rows(view: RunView) -> list[dict[str, Any]]:
    """Return a row for each trial, whose values are text, numbers or None.

    Columns `config.KEY` are settings, `script.KEY` switches, and `metrics.KEY` measurements.
    """
    found = []
    for each in view.trials:
        row = each.to_json()
        config, script = hide_secrets_in_values([row.pop("overrides"), row.pop("script_args")])
        below = {"config": flat(config), "script": script, "metrics": row.pop("metrics") or {}}
        row |= {"is_best": each.is_best, "message": row["message"][:_MOST_TEXT]}
        row |= {"took_s": each.took_s, "ended_s": each.ended_s}
        for name, values in below.items():
            row |= {f"{name}.{key}": _plain(value) for key, value in values.items()}
        found.append(row)
    return found


def to_csv(view: RunView, output: Path, name: str) -> None:
    """Write a table with a line for each trial."""
    table = rows(view)
    with open(output, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _columns(table))
        writer.writeheader()
        writer.writerows({key: _harmless(value) for key, value in row.items()} for row in table)


def to_parquet(view: RunView, output: Path, name: str) -> None:
    """Write the table of `to_csv` by columns; columns with values of several types become text."""
    import pyarrow
    import pyarrow.parquet

    table, columns = rows(view), {}
    for key in _columns(table):
        values = [row.get(key) for row in table]
        mixed = len({type(value) for value in values if value is not None}) > 1
        columns[key] = [str(v) if mixed and v is not None else v for v in values]
    pyarrow.parquet.write_table(pyarrow.table(columns), output)


def to_optuna(view: RunView, output: Path, name: str) -> None:
    """Write one study into a SQLite storage.

    Trials without a value are exported as failed. Parameters are strategy and settings.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=_url_of(output),
        study_name=name,
        direction="minimize" if view.plan.objective.smaller_is_better else "maximize",
    )
    for key, value in {**_decision(view), **view.info}.items():
        is_number = isinstance(value, float)
        study.set_user_attr(str(key), value if is_number else str(value)[:_MOST_TEXT])
    states, distributions = optuna.trial.TrialState, _distributions(view)
    for each, outcome in _list_compared(view):
        params = _params(each)
        frozen = optuna.trial.create_trial(
            state=states.FAIL if each.value is None else states.COMPLETE,
            value=each.value,
            params=params,
            distributions={key: distributions[key] for key in params},
            user_attrs={
                "name": each.trial.name,
                "is_best": each.is_best,
                "kind": each.trial.kind.value,
                "outcome": outcome.kind.value,
                "message": outcome.message[:_MOST_TEXT],
                **({} if outcome.metrics is None else outcome.metrics.to_json()),
            },
        )
        ended_at_s = _ended_at_s(each)
        frozen.datetime_start = datetime.fromtimestamp(ended_at_s - outcome.duration_s)
        frozen.datetime_complete = datetime.fromtimestamp(ended_at_s)
        study.add_trial(frozen)


def to_mlflow(view: RunView, output: Path, name: str) -> None:
    """Write a tracking store in SQLite: one experiment with an MLflow run for each trial."""
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=_url_of(output))
    tags = {key: str(value)[:_MOST_TEXT] for key, value in _decision(view).items()}
    place = output.parent.as_uri()
    experiment = client.create_experiment(name, artifact_location=place, tags=tags)
    for each, outcome in _list_compared(view):
        ended_ms = round(1000 * _ended_at_s(each))
        created = client.create_run(
            experiment,
            start_time=ended_ms - round(1000 * outcome.duration_s),
            run_name=each.trial.name,
            tags={
                "kind": each.trial.kind.value,
                "outcome": outcome.kind.value,
                "is_best": str(each.is_best),
            },
        ).info.run_id
        metrics = {} if outcome.metrics is None else outcome.metrics.to_json()
        client.log_batch(
            created,
            metrics=[
                Metric(key, float(value), ended_ms, 0)
                for key, value in metrics.items()
                if value is not None
            ],
            params=[Param(key, str(value)) for key, value in _params(each).items()],
            tags=[RunTag("message", outcome.message[:_MOST_TEXT])] if outcome.message else [],
        )
        status = "FINISHED" if outcome.ok else "FAILED"
        client.set_terminated(created, status=status, end_time=ended_ms)


def to_tensorboard(view: RunView, output: Path, name: str) -> None:
    """Write a folder of event files, with a run for each trial.

    A run has the trial's settings (the HPARAMS tab) and the times of its steps.
    """
    from torch.utils.tensorboard import SummaryWriter

    output.mkdir()
    for each, outcome in _list_compared(view):
        measured = {} if each.value is None else {view.plan.metric: each.value}
        params = {**_params(each), "outcome": outcome.kind.value, "is_best": each.is_best}
        with SummaryWriter(str(output / each.trial.name)) as writer:
            writer.add_hparams(params, measured, run_name=".", global_step=0)
            for number, step_ms in enumerate(outcome.step_ms, start=1):
                writer.add_scalar("step_ms", step_ms, number, walltime=_ended_at_s(each))


@dataclass(frozen=True)
class Exporter:
    """An export of `dsat export --to`.

    `write` takes the view of a run, the file or folder to write, and the run's name.
    """

    write: Callable[[RunView, Path, str], None]
    suffix: str
    package: str = ""


EXPORTERS: Mapping[str, Exporter] = {
    "optuna": Exporter(to_optuna, ".optuna.db", "optuna"),
    "mlflow": Exporter(to_mlflow, ".mlflow.db", "mlflow"),
    "tensorboard": Exporter(to_tensorboard, ".tensorboard", "tensorboard"),
    "csv": Exporter(to_csv, ".csv"),
    "parquet": Exporter(to_parquet, ".parquet", "pyarrow"),
}


def export(view: RunView, to: str, output: Path, name: str) -> None:
    """Write a run for another tool.

    Args:
        to: a key of `EXPORTERS`.
        output: file or folder to make.
        name: name of the study or experiment.

    Raises:
        UserInputError: `output` exists, its folder does not, its path is not UTF-8, or the tool is
            not installed.
        DsatError: a database cannot be written, such as on a full disk.
        OSError: a file cannot be written.
    """
    exporter = EXPORTERS[to]
    if output.exists():
        raise UserInputError(
            "exists already", where=str(output), hint="Choose another path with --output."
        )
    if not output.parent.is_dir():
        raise UserInputError("there is no such folder", where=str(output.parent))
    try:
        with written_atomically(output.resolve()) as temporary:
            exporter.write(view, temporary, name)
    except ImportError as error:
        raise UserInputError(
            f"needs {exporter.package}: {error}",
            where=f"--to {to}",
            hint=f"pip install {exporter.package}",
        ) from None
    except UnicodeEncodeError:
        raise UserInputError(
            f"{to} can write only to paths in UTF-8",
            where=str(output.resolve()),
            hint="Choose another path with --output. If the name of the run's folder is not UTF-8, "
            "rename the folder first.",
        ) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _DATABASES:
            raise
        raise DsatError(f"{output}: {str(error).partition(chr(10))[0]}") from error


def _url_of(database: Path) -> str:
    """Return the URL of a SQLite database; escape characters of its path, such as `?`."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(database)).render_as_string()


def _list_compared(view: RunView) -> Iterator[tuple[TrialView, Outcome]]:
    """Yield trials in order of their ends, except the profile, whose speed is not comparable."""
    for each in sorted(view.ended, key=lambda each: each.ended_s or 0.0):
        if each.trial.kind is not TrialKind.PROFILE and each.outcome is not None:
            yield each, each.outcome


def _ended_at_s(each: TrialView) -> float:
    return each.ended_at_s or each.ended_s or 0.0


def _decision(view: RunView) -> dict[str, Any]:
    """Return the verdict, the gain, and the values of the best and the user's configuration."""
    found = {
        "metric": view.plan.metric,
        "verdict": "\n".join(view.verdict.lines),
        "gain": view.gain.ratio,
        "best_value": view.best_value,
        "own_value": view.gain.own_value,
    }
    return {key: value for key, value in found.items() if value is not None}


def _params(each: TrialView) -> dict[str, Any]:
    """Return strategy and settings of a trial, without the redundant global batch."""
    batch = each.trial.batch.config()
    found = {
        key.removeprefix("zero_optimization."): _plain(batch.get(key, value))
        for key, value in each.settings.items()
        if key != "train_batch_size"
    }
    return {"strategy": each.trial.strategy, **found}


def _distributions(view: RunView) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return the distribution of each parameter: a range for batch sizes, else tried values."""
    from optuna.distributions import CategoricalDistribution, IntDistribution

    values: dict[str, list[Any]] = {}
    for each, _ in _list_compared(view):
        for key, value in _params(each).items():
            values.setdefault(key, []).append(value)
    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for key, tried in values.items():
        if key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            found[key] = IntDistribution(min(tried), max(tried), log=True)
        else:
            found[key] = CategoricalDistribution(tuple(dict.fromkeys(tried)))
    return found


def _columns(table: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in table for key in row))


def _plain(value: Any) -> Any:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else json.dumps(value)


def _harmless(value: Any) -> Any:
    """Escape text that a spreadsheet would run as a formula (OWASP, CSV injection)."""
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
    return f"'{value}" if is_formula else value
