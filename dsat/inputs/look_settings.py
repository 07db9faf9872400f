"""Settings of the commands that only look; their options are declared here.

Most take a run: its folder, or the folder's name below `dsat_runs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs.option import PATH, WORD, at_least, check_together, option

SHOW, COMPARE, RUNS, EXPORT, IMPORT, WATCH, DOCTOR = LOOKS = (
    "show",
    "compare",
    "runs",
    "export",
    "import",
    "watch",
    "doctor",
)
EXPORT_TO = ("optuna", "mlflow", "tensorboard", "csv", "parquet")


@dataclass(frozen=True, kw_only=True)
class ShowSettings:
    """Settings of `dsat show`.

    Attributes:
        run: None for the newest one.
    """

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
    json: bool = option("--json", shell_only=True, help="print it as JSON")

    def __post_init__(self) -> None:
        check_together(self)


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Settings of `dsat compare`: at least two runs."""

    runs: tuple[Path, ...]
    json: bool = option("--json", shell_only=True, help="print it as JSON")

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise UserInputError("dsat compare takes two runs or more")


@dataclass(frozen=True, kw_only=True)
class RunsSettings:
    """Settings of `dsat runs`.

    Attributes:
        folder: whose runs are listed; None for `dsat_runs`.
    """

    folder: Path | None = None
    json: bool = option("--json", shell_only=True, help="print them as JSON")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of `dsat export`.

    Attributes:
        run: None for the newest one.
    """

    run: Path | None = None
    to: str | None = option("--to", kind=WORD, choices=EXPORT_TO, help="for which tool")
    output: Path | None = option(
        "--output",
        goes_with="--to",
        kind=PATH,
        metavar="PATH",
        help="file or folder to make (default: named after the run, here)",
    )
    share: Path | None = option(
        "--share",
        kind=PATH,
        metavar="FILE",
        help="write a file that may be given away, without names, paths, arguments and secrets; "
        "`dsat import` reads it",
    )
    json: bool = option("--json", shell_only=True, help="print what was made as JSON")

    def __post_init__(self) -> None:
        if (self.to is None) == (self.share is None):
            raise UserInputError(f"give --to ({', '.join(EXPORT_TO)}) or --share FILE")
        check_together(self)


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """Settings of `dsat import`: files of `dsat export --share`."""

    files: tuple[Path, ...]
    json: bool = option("--json", shell_only=True, help="print what is in them as JSON")


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Settings of `dsat watch`.

    Attributes:
        run: a run, or a folder with runs; None for the newest run; the number of an experiment that
            searches on a Determined cluster.
    """

    run: Path | None = None
    port: int | None = option(
        "--port", kind=at_least(1), metavar="N", help="of this machine (default: any free one)"
    )
    json: bool = option("--json", shell_only=True, help="print where, or the result, as JSON")

    @property
    def experiment(self) -> int | None:
        """Number of the experiment on a Determined cluster that is meant; None for a run here."""
        name = "" if self.run is None else str(self.run)
        return int(name) if name.isdecimal() and not Path(name).exists() else None


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Settings of `dsat doctor`."""

    json: bool = option("--json", shell_only=True, help="print it as JSON")


LookSettings = (
    ShowSettings
    | CompareSettings
    | RunsSettings
    | ExportSettings
    | ImportSettings
    | WatchSettings
    | DoctorSettings
)

LOOK_SETTINGS: Mapping[str, Any] = {
    SHOW: ShowSettings,
    COMPARE: CompareSettings,
    RUNS: RunsSettings,
    EXPORT: ExportSettings,
    IMPORT: ImportSettings,
    WATCH: WatchSettings,
    DOCTOR: DoctorSettings,
}
