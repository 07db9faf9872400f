"""Every script of the catalogue, tuned as by its user: its result, and its unchanged folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testing import warm_command
from testing.catalogue import NIGHTLY, ROOT, SCRIPTS, SLOW, Script, of_suite
from testing.command import typed
from testing.kinds import KINDS
from testing.local import buffers_of, processes_of
from testing.tuned_scripts import (
    OPTIONS,
    Tuned,
    documented_commands,
    fault_of,
    fault_of_answer,
    fault_of_statements,
    is_installed,
    snapshot,
    tune,
)

pytestmark = pytest.mark.slow
EXAMPLES = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir())


def rows() -> list[object]:
    """Return the scripts of `make test` and of `make nightly`, as test parameters."""
    nightly = [(script, "") for script in of_suite(NIGHTLY)]
    nightly += [(SCRIPTS["HF Trainer"], "accelerate's plugin")]
    return [
        *(pytest.param(script, "", id=script.name) for script in of_suite(SLOW)),
        *(
            pytest.param(script, launcher, id=script.name + launcher, marks=pytest.mark.nightly)
            for script, launcher in nightly
        ),
    ]


def searched(script: Script, folder: Path, launcher: str = "", ranks: int = 1) -> Tuned:
    if not is_installed(script.needs):
        pytest.skip(f"{script.needs} is not installed")
    return tune(script, folder, launcher, ranks, start=warm_command.words())


@pytest.mark.parametrize(("script", "launcher"), rows())
def test_a_script_is_tuned_and_its_folder_stays(
    tmp_path: Path, script: Script, launcher: str
) -> None:
    told = searched(script, tmp_path / "work", launcher)
    assert fault_of(script, told) == ""
    assert processes_of(told.folder) == [] and buffers_of(told.folder / "run") == []
    if script.own_file:
        assert fault_of_answer(script, told) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("script", [pytest.param(s, id=s.name) for s in KINDS])
def test_the_verdict_on_a_kind_of_program_is_true(tmp_path: Path, script: Script) -> None:
    """The printed command trains as many steps as the user's own, with the micro batch it names."""
    told = searched(script, tmp_path / "work", ranks=script.most_ranks)
    assert fault_of_statements(script, told) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_folder_of_an_example_stays(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, folder)
    before = snapshot(folder)
    at, (method, *words) = documented_commands()[name]
    assert at == f"examples/{name}"
    told = typed(folder, method, *OPTIONS.split(), "--slot-memory", "600MiB", *words)
    assert told.status == 0, told
    assert snapshot(folder) == before


def test_checkpoints_and_trackers_are_left_alone(tmp_path: Path) -> None:
    """Only the resulting configuration keeps the user's own settings for them."""
    script = SCRIPTS["checkpoints and trackers"]
    told = searched(script, tmp_path / "work")
    assert fault_of(script, told) == ""
    best = json.loads((told.folder / "run" / "best_ds_config.json").read_text())
    assert best["tensorboard"]["enabled"] and best["wall_clock_breakdown"]
    logs = [path.read_text() for path in (told.folder / "run").rglob("stderr.log")]
    assert any("save_checkpoint did nothing" in log for log in logs)
    assert any("load_checkpoint loaded only the client state" in log for log in logs)


@pytest.mark.parametrize(
    "script", [pytest.param(s, id=s.name) for s in of_suite(SLOW, failing=True)]
)
def test_an_error_of_the_script_is_shown_in_its_own_words(tmp_path: Path, script: Script) -> None:
    told = searched(script, tmp_path / "work")
    assert fault_of(script, told) == ""
    assert script.fails is not None
    if script.fails.status == 2:
        assert "Traceback" not in told.err and "exit status" not in told.err
    trials = told.folder / "run" / "trials"
    kept = [path.name for path in trials.iterdir()] if trials.exists() else []
    assert all(name.startswith("baseline") for name in kept)


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    told = searched(SCRIPTS["files of its own"], tmp_path_factory.mktemp("files") / "work")
    assert told.status == 0, told
    return told


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["before", "spawned", "after"])
@pytest.mark.parametrize(
    "how", ["deleted", "renamed", "rotated", "truncated", "appended", "emptied"]
)
def test_a_file_of_the_user_stays_as_it_was(rotated: Tuned, how: str, when: str) -> None:
    assert [path for path in rotated.changed if path.startswith(f"{how}.{when}")] == []
