"""The Python API: the commands as functions, for programs and notebooks.

Options have the names and defaults of the command line. dsat prints nothing, sets no signal handler
and never exits: messages go to the logger `dsat`. Errors are `DsatError`s; an unknown keyword
raises TypeError, and `register_search` and `register_engine` raise TypeError or ValueError.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dsat.api_options import PathLike, Target, document, read_keywords, read_target
from dsat.command.ds_config import flat
from dsat.determined_cluster import submit
from dsat.determined_cluster.select_master import Choice
from dsat.engines.places import ENGINE_NAMES
from dsat.errors import DsatError, SearchFailed, UserInputError
from dsat.estimating import tables
from dsat.estimating.options import EstimateSettings
from dsat.estimating.tables import Estimate
from dsat.options import options_of
from dsat.prepare.target import ModelSettings
from dsat.projecting import projector
from dsat.projecting.options import ProjectSettings
from dsat.projecting.projection import Projection
from dsat.run.journal import FILE_NAME
from dsat.run.loop import Observer
from dsat.run.run import Run
from dsat.search import BUILT_IN, SEARCHES, Search
from dsat.show import past_runs
from dsat.show.summary import read_train_line
from dsat.show.view import RunView, TrialView
from dsat.tuning import command_line, local, train_command
from dsat.tuning.dry_run import describe_plan
from dsat.tuning.local import EngineFactory, LocalSearch
from dsat.tuning.make_settings import all_options, make_settings
from dsat.tuning.preparation import Prepared, prepare_run
from dsat.tuning.settings import DEFAULT_METHOD, Settings
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from dsat.api_options import EstimateOptions, ProjectOptions, TuneOptions

__all__ = [
    "Estimate",
    "Projection",
    "Result",
    "estimate",
    "load_run",
    "project",
    "register_engine",
    "register_search",
    "tune",
]

logging.getLogger("dsat").addHandler(logging.NullHandler())

Row = Mapping[str, Any]
Callback = Callable[[Row], object]
_Settings = TypeVar("_Settings", bound=ModelSettings)


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a search, or its state so far; `str(result)` is the verdict.

    A row describes one trial as a plain mapping: `name`, `kind` ("profile", "baseline", "search",
    "repeat" or "final"), `stage`, the batch sizes, `overrides` of the DeepSpeed configuration,
    `script_args`, `outcome` ("OK", "OOM", ..; None while the trial runs), `message`,
    `predicted_bytes` and `used_bytes` (memory of a device), and `metrics` (None if not measured).

    Attributes:
        run_dir: absolute path of the run's folder; for a search on a Determined cluster, the local
            copy of its results. None for a dry run and for a cluster search without such a copy.
        metric: name of the optimised metric.
        best: the row of the best trial, as the search measured it; None if there is none.
        best_value: metric of the best trial; from the finals, if any ran.
        best_config: the DeepSpeed configuration to train with; None if there is no best trial.
        baseline: the row of the user's own configuration; None if it has not run.
        gain: how many times better the best is than the user's configuration; None if unknown.
        trials: all rows, in the order in which the trials began.
        warnings: distinct warnings of the run.
        stop_reason: why the search ended; None if it was interrupted or is running.
        interrupted: whether Ctrl-C ended `tune`. A search on a cluster continues nevertheless.
        wall_s: seconds of the search, without pauses.
        train_command: shell command that trains with the best configuration; None if unknown.
        url: web page of the search on a Determined cluster; None elsewhere.
        verdict: text of `str(result)`, based on the finals if any ran. A dry run sets only `metric`
            and, as `verdict`, the text of the plan.
    """

    run_dir: Path | None
    metric: str
    best: Row | None = None
    best_value: float | None = None
    best_config: dict[str, Any] | None = None
    baseline: Row | None = None
    gain: float | None = None
    trials: tuple[Row, ...] = ()
    warnings: tuple[str, ...] = ()
    stop_reason: str | None = None
    interrupted: bool = False
    wall_s: float = 0.0
    train_command: str | None = None
    url: str | None = None
    verdict: str = ""

    def __str__(self) -> str:
        return self.verdict

    def __repr__(self) -> str:
        best = None if self.best is None else self.best["name"]
        return f"Result(run_dir={self.run_dir}, best={best}, gain={self.gain}, ...)"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**asdict(self), "run_dir": None if self.run_dir is None else str(self.run_dir)}

    def to_pandas(self) -> pandas.DataFrame:
        """Return the trials as a table, with a column for each metric (`metrics.throughput`, ..).

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        rows = [{**row, **flat({"metrics": row["metrics"] or {}})} for row in self.trials]
        return pandas.DataFrame(rows).drop(columns="metrics", errors="ignore")


def tune(
    target: Target,
    model_dir: PathLike | None = None,
    *,
    method: str = DEFAULT_METHOD,
    callbacks: Iterable[Callback] = (),
    search_options: Mapping[str, Any] | None = None,
    **options: Unpack[TuneOptions],
) -> Result:
    """Find the DeepSpeed configuration with which a training script runs fastest.

    The same as `dsat tune`. It returns a `Result` when the search is finished (with `detach`, when
    it is submitted), and may be called from any thread. Ctrl-C in the main thread ends the search
    and returns the best result so far; on a Determined cluster the search continues. Before the
    search begins, Ctrl-C raises KeyboardInterrupt.

    Args:
        target: a script (`"train.py"`), a command (`["torchrun", "train.py", "--deepspeed_config",
            "ds.json"]`), or an experiment configuration (`"deepspeed.yaml"`).
        model_dir: the folder of an experiment's script; by default its configuration's folder.
        method: "model", "asha", "binary", "random" or "gridsearch", or a name passed to
            `register_search`.
        callbacks: functions called after each trial with its row (see `Result`); not on a cluster.
            `tune` ends the search and raises the exception of a callback that fails.
        search_options: keyword arguments of a registered search's constructor.
        options: the options of the command line, by their names and with their defaults.

    Raises:
        UserInputError: an argument or a file is wrong, or the script ignores its configuration.
        SearchFailed: no configuration could be measured, or the full-length training failed;
            `detail` holds the script's traceback, if known.
        DsatError: another error, see `dsat.errors`.
    """
    declared = list(all_options(method, local.ENGINES))
    values, words = read_keywords(declared, options, f"tune(method={method!r})")
    settings = make_settings(
        {**read_target(target, model_dir), **values, "method": method},
        words if method == DEFAULT_METHOD else {**words, "method": "method"},
        keeps_batch=True,
        search_options=search_options,
    )
    calls = list(callbacks) if isinstance(callbacks, Iterable) else [None]
    if not all(map(callable, calls)):
        raise UserInputError(f"must be a list of functions, not {callbacks!r}", where="callbacks")
    try:
        choice = submit.select_place(settings) if settings.engine not in local.ENGINES else None
        if choice is not None and choice.master is not None:
            return _tune_on_cluster(settings, choice, calls)
        line = None if search_options else command_line.write_line(settings, declared, options)
        with prepare_run(settings, line) as ready:
            if settings.dry_run:
                return _result_of_dry_run(settings, describe_plan(ready))
            return _tune_here(ready, calls)
    except OSError as error:
        raise DsatError.convert_os_error(error) from error


def load_run(path: PathLike) -> Result:
    """Return the result of a run, or its state so far, from the journal in the run's folder.

    Args:
        path: the run's folder, or its name in `dsat_runs`, or its journal.

    Raises:
        UserInputError: there is no run, or it has not begun.
        JournalError: the journal cannot be read.
    """
    folder = Path(path)
    if folder.name == FILE_NAME:
        folder = folder.parent
    past = past_runs.load(folder)
    return _result(
        RunView(past.run).to_json(past.folder),
        run_dir=past.folder,
        train_command=read_train_line(past.folder) or None,
    )


def register_search(name: str, search: type[Search]) -> None:
    """Register a search for `tune(method=name)`.

    Args:
        name: name of the method.
        search: a subclass of `dsat.search.Search`.

    Raises:
        ValueError: dsat has a built-in method of this name.
        TypeError: the class is not a search, or does not implement every abstract method.
    """
    if name in BUILT_IN:
        raise ValueError(f"dsat already has a method {name!r}: choose another name")
    is_search = isinstance(search, type) and issubclass(search, Search)
    if not is_search or inspect.isabstract(search):
        hint = ""
        if hasattr(search, "ask"):
            hint = " (`ask` and `tell` became `propose`: see the changelog)"
        raise TypeError(
            f"{search!r} is not a subclass of dsat.search.Search that defines `propose`{hint}"
        )
    SEARCHES[name] = search


def register_engine(name: str, make_engine: EngineFactory) -> None:
    """Register an engine for `tune(engine=name)`.

    Args:
        name: name of the engine.
        make_engine: function that returns a `dsat.engines.Engine`. Its two arguments are an object
            with `experiment`, `program`, `plan` and `settings`, and the path of the run's folder.
            With such an engine, memory is predicted by formula.

    Raises:
        ValueError: dsat has a built-in engine of this name.
    """
    if name in ENGINE_NAMES:
        raise ValueError(f"dsat already has an engine {name!r}: choose another name")
    local.ENGINES[name] = make_engine


def estimate(
    target: Target | None = None,
    model_dir: PathLike | None = None,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """Estimate the memory that each ZeRO stage and offloading needs, without running a trial.

    Args:
        target: a script, command or experiment, as for `tune`; None with `model`.
        model_dir: the folder of an experiment's script; by default its configuration's folder.
        options: see below.

    Returns:
        The table: each of `lines` has `strategy`, `slots` (devices), `needed` and `host` (bytes of
        a device and of a host). `str(table)` is the text that `dsat estimate` prints.

    Raises:
        UserInputError: an argument or a file is wrong.
        DsatError: the script cannot be simulated.
    """
    settings = _model_settings(EstimateSettings, target, model_dir, options, "estimate()")
    return tables.estimate(settings)


def project(
    target: Target | None = None,
    model_dir: PathLike | None = None,
    **options: Unpack[ProjectOptions],
) -> Projection:
    """Predict throughput, scaling, time and cost of a training on a given type of GPU.

    Args:
        target: a script, command or experiment, as for `tune`; None with `model`.
        model_dir: the folder of an experiment's script; by default its configuration's folder.
        options: see below.

    Returns:
        The projection: `own` has a row for each number of GPUs, and `best` the fastest rows by
        number of GPUs. A row has `time.seconds` of a step, `samples_per_second`, and `spread`, the
        90 % interval as factors of the throughput. `str(projection)` is the text that
        `dsat project` prints.

    Raises:
        UserInputError: an argument or a file is wrong.
        DsatError: the script cannot be simulated.
    """
    settings = _model_settings(ProjectSettings, target, model_dir, options, "project()")
    return projector.project(settings)


def _result_of_dry_run(settings: Settings, lines: Iterable[str]) -> Result:
    return Result(run_dir=None, metric=settings.metric, verdict="\n".join(lines))


def _tune_on_cluster(settings: Settings, choice: Choice, callbacks: Sequence[Callback]) -> Result:
    if callbacks:
        raise UserInputError(
            "work on this machine only",
            where="callbacks",
            hint="Leave them out, or use engine='local'.",
        )
    ready = submit.prepare(settings, choice)
    if settings.dry_run:
        return _result_of_dry_run(settings, ready.describe())
    submitted = submit.submit(ready, detach=settings.detach)
    if submitted.state is not None and not submitted.has_result:
        raise SearchFailed(f"{submitted.failure}; see {submitted.url}")
    return _result(
        {"metric": settings.metric, **submitted.result},
        run_dir=submitted.run_dir,
        interrupted=submitted.interrupted,
        url=submitted.url,
    )


def _tune_here(ready: Prepared, callbacks: Sequence[Callback]) -> Result:
    with LocalSearch(ready) as search:
        search.search(_Calls(callbacks))
        if search.failure is not None:
            raise search.failure
        try:
            search.train()
        except KeyboardInterrupt:
            search.interrupted = True
        line = None
        if search.run.best is not None:
            line = train_command.make_line(ready, search.run, search.folder) or None
        return _result(
            RunView(search.run).to_json(search.folder),
            run_dir=search.folder,
            train_command=line,
            interrupted=search.interrupted,
        )


def _result(summary: Mapping[str, Any], *, run_dir: Path | None, **known: Any) -> Result:
    """Make a `Result` from a run's summary and `known` fields; all other fields get defaults."""
    names = "metric best best_value baseline gain stop_reason wall_s".split()
    return Result(
        **{name: summary[name] for name in names if name in summary},
        best_config=summary.get("best_ds_config"),
        trials=tuple(summary.get("trials", ())),
        warnings=tuple(summary.get("warnings", ())),
        verdict="\n".join(summary.get("verdict", ())),
        run_dir=None if run_dir is None else run_dir.absolute(),
        **known,
    )


class _Calls(Observer):
    """Observer of the loop that runs the user's callbacks after each trial."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        row = TrialView(run, trial).to_json()
        for callback in self._callbacks:
            callback(row)


def _model_settings(
    kind: type[_Settings],
    target: Target | None,
    model_dir: PathLike | None,
    options: Mapping[str, Any],
    called: str,
) -> _Settings:
    """Make the settings of `estimate` or `project`; `called` is the call's name in messages."""
    values, _ = read_keywords(options_of(kind), options, called)
    if target is None and values.get("model") is not None:
        return kind(**values)
    if target is None:
        raise UserInputError(
            "is missing", where="target", hint="Give a script, a command, or model=NAME."
        )
    return kind(**read_target(target, model_dir), **values)


document(tune, all_options())
document(estimate, options_of(EstimateSettings))
document(project, options_of(ProjectSettings))
