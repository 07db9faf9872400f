"""Settings of the commands that only look; their options are declared here.

Most take a run: its folder, or the folder's name below `dsat_runs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dsat.errors import UserInputError
from dsat.options import PATH, WORD, at_least, check_together, option

EXPORT_TO = ("optuna", "mlflow", "tensorboard", "csv", "parquet")
_RUN = "folder of a run, or its name in dsat_runs"
_RUN_OR_EXPERIMENT = (
    f"{_RUN} (default: the newest), or the number of the search runner's experiment on a "
    "Determined cluster"
)
_NEWEST = {"nargs": "?", "metavar": "RUN", "help": f"{_RUN} (default: the newest)"}


@dataclass(frozen=True, kw_only=True)
class LookSettings:
    """Settings of a command that only looks.

    Attributes:
        summary: one line for `--help`.
        argument: field of the command's argument, and how argparse declares it; None if it takes
            none.
    """

    summary: ClassVar[str]
    argument: ClassVar[tuple[str, Mapping[str, Any]] | None] = None
    json: bool = option("--json", shell_only=True, help="print the answer as JSON")


@dataclass(frozen=True, kw_only=True)
class ShowSettings(LookSettings):
    """Settings of `dsat show`.

    Attributes:
        run: None for the newest one.
    """

    summary = "what a run found, or has found so far"
    argument = ("run", _NEWEST)
    run: Path | None = None
    trials: bool = option("--trials", help="the table of all trials")
    trial: str | None = option(
        "--trial",
        excludes=("--trials",),
        kind=WORD,
        metavar="NAME",
        help="everything of one trial: its configuration against yours, its memory by phase, the "
        "last lines of its log",
    )

    def __post_init__(self) -> None:
        check_together(self)


@dataclass(frozen=True, kw_only=True)
class CompareSettings(LookSettings):
    """Settings of `dsat compare`: at least two runs."""

    summary = "two runs or more side by side: what they found, and what is different in it"
    argument = ("runs", {"nargs": "+", "metavar": "RUN", "help": _RUN})
    runs: tuple[Path, ...]

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise UserInputError("dsat compare takes two runs or more")


@dataclass(frozen=True, kw_only=True)
class RunsSettings(LookSettings):
    """Settings of `dsat runs`.

    Attributes:
        folder: whose runs are listed; None for `dsat_runs`.
    """

    summary = "lists runs, the newest first"
    argument = (
        "folder",
        {"nargs": "?", "metavar": "FOLDER", "help": "folder with runs (default: dsat_runs)"},
    )
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ExportSettings(LookSettings):
    """Settings of `dsat export`.

    Attributes:
        run: None for the newest one.
    """

    summary = "writes a run for other tools: Optuna, MLflow, TensorBoard, tables"
    argument = ("run", _NEWEST)
    run: Path | None = None
    to: str | None = option("--to", kind=WORD, choices=EXPORT_TO, help="for which tool")
    output: Path | None = option(
        "--output",
        kind=PATH,
        metavar="PATH",
        help="file or folder to make (default: named after the run, here)",
    )

    def __post_init__(self) -> None:
        if self.to is None:
            one_of = ", ".join(EXPORT_TO)
            raise UserInputError("is missing", where="--to", hint=f"Name one of {one_of}.")


@dataclass(frozen=True, kw_only=True)
class WatchSettings(LookSettings):
    """Settings of `dsat watch`.

    Attributes:
        run: None for the newest run; the number of an experiment that searches on a Determined
            cluster.
    """

    summary = "serve the report of a run as a page that refreshes itself"
    argument = ("run", {**_NEWEST, "help": _RUN_OR_EXPERIMENT})
    run: Path | None = None
    port: int | None = option(
        "--port", kind=at_least(1), metavar="N", help="port to listen on (default: a free one)"
    )

    @property
    def experiment(self) -> int | None:
        """Number of the experiment on a Determined cluster that is meant; None for a run here."""
        name = "" if self.run is None else str(self.run)
        return int(name) if name.isdecimal() and not Path(name).exists() else None


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(LookSettings):
    """Settings of `dsat doctor`."""

    summary = (
        "looks at this environment: what will work here, what will not, and how to fix it; exit "
        "status 1 if no trial can run"
    )


LOOK_SETTINGS: Mapping[str, type[LookSettings]] = {
    "show": ShowSettings,
    "compare": CompareSettings,
    "runs": RunsSettings,
    "export": ExportSettings,
    "watch": WatchSettings,
    "doctor": DoctorSettings,
}
