"""Trials side by side have a view each of the folder that their script writes into."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsat.engines.local import views
from dsat.engines.local.retries import BESIDE_OTHERS
from dsat.engines.local.views import VIEW, WorkingFolder
from dsat.values.outcome import Outcome
from dsat.values.trial import TrialKind
from testing.local import PATIENCE_S, PROGRAMS, Bench, engine_of


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """The user's folder, with a run's in it."""
    folder = tmp_path / "user"
    for path in ("train.py", "data/big.bin", "out/log.txt", "dsat_runs/run/journal.jsonl"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


def seen(real: Path, *write: Callable[[], object]) -> WorkingFolder:
    """The folder, after a trial that wrote there."""
    working = WorkingFolder(real, real / "dsat_runs" / "run")
    working.watch()
    (real / "dsat_runs/run/journal.jsonl").write_text("dsat itself writes there")
    for each in write:
        each()
    working.look()
    return working


def test_who_writes_nothing_needs_no_view(real: Path) -> None:
    def compile_modules() -> None:
        (real / "__pycache__").mkdir()
        (real / "__pycache__" / "train.pyc").write_text("")

    assert not seen(real, compile_modules).is_written_to


def test_a_lock_that_is_gone_again_was_there(real: Path) -> None:
    lock = real / "lock"
    assert seen(real, lock.mkdir, lock.rmdir).is_written_to


def test_what_is_written_is_the_trials_own_and_all_else_a_link(real: Path) -> None:
    log, new = real / "out" / "log.txt", real / "out" / "new.txt"
    working = seen(real, lambda: log.write_text("profile"), lambda: new.write_text("profile"))
    trial = real / "dsat_runs" / "run" / "trials" / "z1"
    trial.mkdir(parents=True)
    view = working.view_for(trial)
    assert view == trial / VIEW
    assert {path.name for path in view.iterdir()} == {"train.py", "data", "out", "dsat_runs"}
    assert [(view / name).is_symlink() for name in ("train.py", "data", "out")] == [1, 1, 0]
    assert (view / "out" / "new.txt").read_text() == "profile"
    (view / "out" / "log.txt").write_text("trial")
    (view / "out" / "more.txt").write_text("trial")
    assert log.read_text() == "profile" and len(list((real / "out").iterdir())) == 2
    again = WorkingFolder(real, real / "dsat_runs" / "run")
    assert again.is_written_to, "a run that is resumed knows it"
    again.give_up_views()
    assert not again.is_written_to


def test_what_is_large_is_not_copied(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_LARGEST_COPY", 3)
    working = seen(real, lambda: (real / "out" / "log.txt").write_text("large"))
    assert (working.view_for(real.parent) / "out" / "log.txt").is_symlink()


def test_nobody_looks_at_a_folder_that_is_too_large(
    real: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_MOST_ENTRIES", 3)
    assert not seen(real, (real / "lock").mkdir).is_written_to


@pytest.mark.slow
def test_trials_that_would_break_each_other_do_not(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    user = tmp_path / "user"
    shutil.copytree(PROGRAMS / "behaviours", user)
    (tmp_path / "above.txt").write_text("beside the folder")
    folder = tmp_path / "run"
    folder.mkdir()
    with_two = engine_of(str(user), folder, slots=2, at_once=2, imported=True)
    bench = Bench(with_two, folder)

    def together(*trials: object) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        while len(found) < len(trials):
            found.update(with_two.poll(PATIENCE_S))
        return found

    try:
        profile = bench.trial("works in the folder", kind=TrialKind.PROFILE)
        assert bench.run(profile).ok, bench.log(profile)
        trials = [bench.trial("works in the folder") for _ in range(2)]
        for trial in trials:
            with_two.launch(trial)
        for outcome in together(*trials).values():
            assert outcome.ok and BESIDE_OTHERS not in outcome.warnings
        assert not any((bench.path(trial) / VIEW).exists() for trial in trials)
        # Who needs the real folder gets it, alone.
        above = bench.trial("looks above the folder")
        outcome = bench.run(above)
        assert outcome.ok and BESIDE_OTHERS in outcome.warnings
        assert str(user) in (bench.path(above) / "cmd.txt").read_text().splitlines()[1]
    finally:
        with_two.close()
