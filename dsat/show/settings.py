"""Options of the read-only commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dsat.errors import UserInputError
from dsat.options import PATH, WORD, at_least, check_together, option
from dsat.show.exports import EXPORTERS

_RUN = "folder of a run, or its name in dsat_runs"
_NEWEST = f"{_RUN} (default: the newest)"


@dataclass(frozen=True, kw_only=True)
class ReadOnlySettings:
    """Options of a read-only command."""

    summary: ClassVar[str]
    json: bool = option("--json", shell_only=True, help="print JSON")


@dataclass(frozen=True, kw_only=True)
class ShowSettings(ReadOnlySettings):
    """Options of `dsat show`."""

    summary = "print the verdict of a run, or its trials"
    run: Path | None = option("run", kind=PATH, metavar="RUN", help=_NEWEST)
    trials: bool = option("--trials", help="print a table of all trials")
    trial: str | None = option(
        "--trial",
        excludes=("--trials",),
        kind=WORD,
        metavar="NAME",
        help="one trial in full: its configuration and yours, memory by phase, end of its log",
    )

    def __post_init__(self) -> None:
        check_together(self)


@dataclass(frozen=True, kw_only=True)
class CompareSettings(ReadOnlySettings):
    """Options of `dsat compare`: at least two runs."""

    summary = "compare two or more runs"
    runs: tuple[Path, ...] = option(
        "runs", kind=PATH, many=True, default=(), metavar="RUN", help=_RUN
    )

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise UserInputError("dsat compare needs two or more runs. `dsat runs` lists all runs.")


@dataclass(frozen=True, kw_only=True)
class RunsSettings(ReadOnlySettings):
    """Options of `dsat runs`."""

    summary = "list runs, newest first"
    folder: Path | None = option(
        "folder", kind=PATH, metavar="FOLDER", help="folder with runs (default: dsat_runs)"
    )


@dataclass(frozen=True, kw_only=True)
class ExportSettings(ReadOnlySettings):
    """Options of `dsat export`."""

    summary = "export a run to Optuna, MLflow, TensorBoard, CSV or Parquet"
    run: Path | None = option("run", kind=PATH, metavar="RUN", help=_NEWEST)
    to: str | None = option("--to", kind=WORD, choices=tuple(EXPORTERS), help="tool or format")
    output: Path | None = option(
        "--output", kind=PATH, help="file or folder to make (default: named after the run, here)"
    )

    def __post_init__(self) -> None:
        if self.to is None:
            one_of = ", ".join(EXPORTERS)
            raise UserInputError("is missing", where="--to", hint=f"Name one of {one_of}.")


@dataclass(frozen=True, kw_only=True)
class WatchSettings(ReadOnlySettings):
    """Options of `dsat watch`."""

    summary = "serve the report of a run as a page that refreshes itself"
    run: Path | None = option(
        "run",
        kind=PATH,
        metavar="RUN",
        help=f"{_NEWEST}, or the number of the search runner's experiment on a Determined cluster",
    )
    port: int | None = option(
        "--port", kind=at_least(1), help="port to listen on (default: a free one)"
    )

    @property
    def experiment(self) -> int | None:
        """Number of an experiment on a cluster; None for a run on this machine."""
        name = "" if self.run is None else str(self.run)
        return int(name) if name.isdecimal() and not Path(name).exists() else None


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(ReadOnlySettings):
    """Options of `dsat doctor`."""

    summary = "check this environment and suggest fixes; exit status 1 if no trial can run"


READ_ONLY: Mapping[str, type[ReadOnlySettings]] = {
    "show": ShowSettings,
    "compare": CompareSettings,
    "runs": RunsSettings,
    "export": ExportSettings,
    "watch": WatchSettings,
    "doctor": DoctorSettings,
}
