"""A failure that the user may have mended is never remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsat.app import mended, run_folders
from dsat.inputs import entrypoint, experiment
from dsat.inputs.experiment import Experiment
from dsat.tuning import history
from dsat.tuning.journal import FILE_NAME, Journal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome
from testing.helpers import World, drive, failed, plan_of

PLAN = plan_of(max_trials=8)


def a_run(folder: Path, digest: str, *, profile: Outcome | None = None, trials: int = 8) -> Run:
    """A run in a folder: of the made-up world, or with a profile that failed."""
    folder.mkdir()
    with Journal(folder / FILE_NAME) as journal:
        plan = replace(PLAN, max_trials=trials)
        tuner = Tuner(plan, journal, info={mended.DIGEST: digest})
        if profile is None:
            drive(tuner, World())
        else:
            tuner.next_trials(1)
            tuner.record(0, profile)
            tuner.next_trials(1)
            tuner.stop()
        return tuner.run


def begins_anew(folder: Path, digest: str = "as before") -> bool:
    run_folders.earlier_runs(folder, PLAN, digest, takes_over=False)
    return not (folder / FILE_NAME).exists()


def test_a_profile_that_failed_is_run_again(tmp_path: Path) -> None:
    early = replace(failed("ERROR", "No module named 'nonsense'"), before_engine=True)
    run = a_run(tmp_path / "run", "as before", profile=early)
    assert run.stop_reason is not None
    [earlier] = run_folders.earlier_runs(tmp_path / "run", PLAN, "as before", takes_over=False)
    assert not (tmp_path / "run" / FILE_NAME).exists()
    assert history.known_outcomes([earlier], PLAN) == {}


def test_memory_that_ran_out_is_believed(tmp_path: Path) -> None:
    a_run(tmp_path / "run", "as before", profile=failed("OOM"))
    assert not begins_anew(tmp_path / "run")


def test_a_failed_trial_is_run_again_if_the_script_changed_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "run", "as before")
    assert run.best is not None and any(o.kind.value == "ERROR" for o in run.outcomes.values())
    assert not begins_anew(tmp_path / "run", "changed"), "what a finished run found stays"
    path = tmp_path / "run" / FILE_NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))  # interrupted
    assert not begins_anew(tmp_path / "run")
    assert begins_anew(tmp_path / "run", "changed")


def own(folder: Path) -> Experiment:
    (folder / "ds.json").write_text("{}")
    return experiment.of_command(["train.py"], "train", folder, folder / "ds.json")


def test_what_counts_as_a_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "data.bin").write_text("1")
    program = entrypoint.parse(["train.py", "--data", "data.bin"], tmp_path)
    found = [mended.digest_of(own(tmp_path), program)]
    (tmp_path / "dsat_runs").mkdir()
    (tmp_path / "dsat_runs" / "copy.py").write_text("2")
    assert mended.digest_of(own(tmp_path), program) == found[0]
    (tmp_path / "lib").mkdir()
    for name in ("lib/model.py", "data.bin", "train.py"):
        (tmp_path / name).write_text("22")
        found.append(mended.digest_of(own(tmp_path), program))
    assert len(set(found)) == 4
