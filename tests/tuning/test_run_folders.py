"""Folders of runs: one process at a time, and nothing is deleted that dsat did not write."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.errors import JournalLocked
from dsat.run.events import EVENT_PROPOSED, EVENT_START
from dsat.run.folder_lock import FolderLock
from dsat.run.journal import FILE_NAME, Journal
from dsat.tuning import autotuning_section, run_folders
from dsat.tuning.autotuning_section import Section
from dsat.tuning.settings import Settings
from dsat.values.codec import encode
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import plan_of


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def opened(section: Section) -> Iterator[Path]:
    with contextlib.ExitStack() as locks:
        assert section.results_dir is not None
        yield run_folders.of_results(section.results_dir, section, locks)


def section_of(**values: Any) -> Section:
    found = autotuning_section.read({"autotuning": values}, where="ds.json")
    assert found is not None and found.results_dir is not None
    return found


def written_by_dsat(results: Path, exps: Path) -> None:
    """What a run leaves, and a training with its checkpoints."""
    trial = Trial(0, TrialKind.PROFILE, "profile_z1", 1, BatchTriple(1, 1, 1), overrides={})
    with Journal(results / FILE_NAME) as journal:
        journal.append(encode({"event": EVENT_START, "plan": plan_of(), "info": {}}))
        journal.append(encode({"event": EVENT_PROPOSED, "trial": trial}))
    for name in ("profile_z1", "full"):
        (results / name).mkdir()
        (results / name / "trial.json").write_text('{"trial": {}, "program": {}, "task": {}}')
    (results / "summary.txt").write_text("")
    (exps / "profile_z1.json").write_text("{}")


def test_overwrite_deletes_what_dsat_wrote_and_nothing_else() -> None:
    section = section_of(overwrite=True, results_dir="results", exps_dir="exps")
    with opened(section) as results:
        written_by_dsat(results, Path("exps"))
    for path in ("results/notes.txt", "exps/mine.json", "results/data/trial.json", "mine/a.txt"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("precious")
    shutil.rmtree("results/profile_z1")
    Path("results/profile_z1").symlink_to(Path("mine").resolve())  # is not followed
    with opened(section):
        found = (path for top in ("results", "exps", "mine") for path in Path(top).rglob("*"))
        left = {str(path) for path in found if not path.is_dir()}
    assert left == {
        *("results/.dsat", "results/notes.txt", "results/data/trial.json"),
        *("results/full/trial.json", "exps/.dsat", "exps/mine.json", "mine/a.txt"),
    }
    shutil.rmtree("results")
    with opened(section) as results:
        written_by_dsat(results, Path("exps"))
    with opened(section):
        assert not Path("results/profile_z1").exists()


def test_a_folder_without_a_journal_is_nobodys_to_overwrite() -> None:
    """Its files bear names of results, and may be DeepSpeed's own."""
    names = ("ds_config_optimal.json", "summary.txt", "report.html", "best_ds_config.json")
    Path("results").mkdir()
    for name in names:
        (Path("results") / name).write_text("precious")
    with opened(section_of(overwrite=True, results_dir="results", exps_dir="exps")):
        assert {(Path("results") / name).read_text() for name in names} == {"precious"}


@pytest.mark.slow
def test_the_second_process_touches_nothing() -> None:
    """It says who works there, and neither deletes nor renames anything."""
    section = section_of(overwrite=True, results_dir="results", exps_dir="exps")
    with opened(section) as results:
        written_by_dsat(results, Path("exps"))
        before = {path: path.stat().st_mtime_ns for path in sorted(Path().rglob("*"))}
        for other, said in (
            (section, rf"process {os.getpid()} on .*, since 20"),
            (replace(section, results_dir=Path("others")), "exps"),
        ):
            with pytest.raises(JournalLocked, match=said), opened(other):
                pass
        shutil.rmtree("others")
        assert {path: path.stat().st_mtime_ns for path in sorted(Path().rglob("*"))} == before
    settings = Settings(method="asha", run_dir=Path("run"))
    with contextlib.ExitStack() as locks:
        run_folders.of_run(settings, "name", locks)
        with pytest.raises(JournalLocked, match="run: another dsat process"):
            run_folders.of_run(settings, "name", locks)


def test_a_killed_process_holds_no_lock() -> None:
    code = (
        "import os, pathlib, sys\nfrom dsat.run.folder_lock import FolderLock\n"
        "lock = FolderLock(pathlib.Path('run'))\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    told = json.loads(Path("run/.dsat").read_text())
    assert told["pid"] != os.getpid()
    FolderLock(Path("run")).close()


def test_a_lock_that_leads_elsewhere_is_not_followed() -> None:
    Path("run").mkdir()
    Path("precious").write_text("precious")
    Path("run/.dsat").symlink_to("../precious")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(Path("run"))
    assert Path("precious").read_text() == "precious"
