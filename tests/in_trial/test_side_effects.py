"""Which files around it a training may change."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from dsat.engines.trial_folder import CreatedFolders
from dsat.in_trial.adapters.user_files import UserFiles
from dsat.values.outcome import OutcomeKind
from testing.scripts import Scripts

pytestmark = pytest.mark.slow


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Make a user's output of an earlier training, in the temporary folder."""
    folder = tmp_path / "out"
    (folder / "checkpoint-1" / "shards").mkdir(parents=True)
    for name in ("best.pt", "checkpoint-1/shards/0.pt"):
        (folder / name).write_text("old")
    return folder


BEGINS = """
import copy, inspect, pickle, shutil, tempfile
from os import remove, replace
from shutil import rmtree
from torch import save

out = Path("{out}")
engine = make_engine()
"""
OLDER = """
(out / "checkpoint-2").mkdir()
(out / "checkpoint-1" / "new.pt").write_text("new")
shutil.rmtree(out / "checkpoint-1")
rmtree(out)
os.remove(os.fsencode(out / "best.pt"))
remove(out / "best.pt")
(out / "best.pt").unlink()
os.rename(out / "checkpoint-1", out / "before")
for change in (os.replace, replace):
    (out / "part").write_text("new")
    change(out / "part", out / "best.pt")
torch.save([1], out / "best.pt")
save([1], out / "best.pt")
(out / "mine").touch()
train(engine)
"""


def test_what_is_older_stays_whatever_is_made_beside_it(scripts: Scripts, out: Path) -> None:
    ended = scripts.run(BEGINS.format(out=out) + OLDER).well()
    assert (out / "best.pt").read_text() == "old"
    assert (out / "checkpoint-1" / "shards" / "0.pt").read_text() == "old"
    assert not (out / "part").exists(), "nothing is left of what was to take an older place"
    assert (out / "mine").exists()
    assert "torch.save did nothing" in ended.log and "os.remove did nothing" in ended.log


OWN = """
FUNCTIONS = (os.remove, shutil.rmtree, torch.save, torch.nn.Module.__init__, open)


class Store:
    unlink, read = os.unlink, open  # builtin functions are no methods of a class


(out / "mine" / "inner").mkdir(parents=True)
for name in ("a", "method"):
    (out / "mine" / "inner" / name).write_text("new")
Store().unlink(out / "mine" / "inner" / "method")
os.replace(out / "mine" / "inner" / "a", out / "b")
os.symlink("b", out / "link")
os.remove(out / "link")
shutil.rmtree(out / "mine")
os.remove(out / "b")
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "cache.pt").write_text("new")
    torch.save([1], Path(folder) / "weights.pt")
    note(scratch=(Path(folder) / "weights.pt").exists())
note(
    scratch_is_gone=not Path(folder).exists(),
    dir_fd=os.unlink in os.supports_dir_fd,
    signature=list(inspect.signature(os.unlink).parameters),
    read=Store().read(__file__).read() == Path(__file__).read_text(),
    # A pool of processes pickles the functions that it passes on.
    pickled=[pickle.loads(pickle.dumps(f)) is f for f in FUNCTIONS],
    copied=[copy.deepcopy(f) is f for f in FUNCTIONS],
)
train(engine)
"""


def test_its_own_files_are_the_trainings(scripts: Scripts, out: Path) -> None:
    notes = scripts.run(BEGINS.format(out=out) + OWN).well().notes()
    assert sorted(path.name for path in out.iterdir()) == ["best.pt", "checkpoint-1"]
    assert notes["scratch"] and notes["scratch_is_gone"]
    assert notes["dir_fd"], "libraries ask for it (filelock)"
    assert notes["signature"] == ["path", "dir_fd"]
    assert notes["read"] and all([*notes["pickled"], *notes["copied"]])


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        ("torch.save([1], 'best.pt'); open('best.pt')", "dsat did not write this"),
        ("open('other.pt')", ""),
        ("os.makedirs(out)", "same folder"),
    ],
)
def test_a_file_that_dsat_did_not_write_is_not_the_scripts_fault(
    scripts: Scripts, out: Path, reads: str, said: str
) -> None:
    ended = scripts.run(f"{BEGINS.format(out=out)}\n{reads}")
    assert said in ended.outcome.message
    assert ("dsat" in ended.outcome.message) is (said != "")
    assert not (scripts.work / "best.pt").exists()


SAVES = """
import json
import numpy
import safetensors.numpy
from accelerate.utils.other import save as save_early  # which has bound `save_file` itself
from transformers import GPT2Config
import torch.distributed.checkpoint.state_dict_saver as saver

out = Path("{out}")
config, names = GPT2Config(), sorted(path.name for path in out.iterdir())
scripted = torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1))
engine = make_engine()
weights = {{"a": torch.ones(1)}}
save_early(weights, out / "best.pt", safe_serialization=True)
save_early(weights, out / "early.safetensors", safe_serialization=True)
config.save_pretrained(out)
torch.jit.save(scripted, str(out / "best.pt"))
safetensors.numpy.save_file({{"a": numpy.ones(1)}}, str(out / "best.pt"))
saver.save(weights, checkpoint_id=str(out))
numpy.save(out / "array.npy", numpy.zeros(3))
shutil.copy(__file__, out / "best.pt")
shutil.copy2(__file__, out / "best.pt")
os.truncate(out / "best.pt", 0)
note(read=(out / "best.pt").read_text() == Path(__file__).read_text(),
     array=numpy.load(out / "array.npy").sum(),
     added=sorted({{path.name for path in out.iterdir()}} - set(names)))
train(engine)
"""


def test_no_saver_changes_an_older_file(scripts: Scripts, out: Path) -> None:
    (out / "array.npy").write_text("old")
    before = {path: (path.read_text(), path.stat()) for path in out.iterdir() if path.is_file()}
    ended = scripts.run(f"import os, shutil\n{SAVES.format(out=out)}").well()
    for path, (text, status) in before.items():
        assert path.read_text() == text
        assert (path.stat().st_mtime_ns, path.stat().st_mode) == (
            status.st_mtime_ns,
            status.st_mode,
        )
    assert ended.notes() == {"read": True, "array": 0.0, "added": []}


@pytest.mark.parametrize("left", [0, 2])
def test_a_script_that_resumes_a_finished_training_is_told_so(
    scripts: Scripts, out: Path, left: int
) -> None:
    """Only after some steps may a smaller micro batch leave more of them."""
    saved = out / "global_step8"
    saved.mkdir()
    (out / "latest").write_text(saved.name)
    torch.save({"module": {}, "left": left}, saved / "mp_rank_00_model_states.pt")
    script = "engine = make_engine()\n"
    script += f"train(engine, engine.load_checkpoint({str(out)!r})[1]['left'])"
    outcome = scripts.run(script).outcome
    assert outcome.kind is OutcomeKind.INVALID, outcome
    assert f"the script ended after {left} optimizer steps" in outcome.message
    assert f"it continued from the checkpoint {saved}" in outcome.message
    assert outcome.smaller_may_run is (left > 0)


RELATIVES = """
import gzip, logging, numpy, shutil, zipfile

out = Path("{out}")
fresh = Path("fresh-{first}")
{engine}
gzip.open(out / "best.pt", "wb").close()
zipfile.ZipFile(out / "best.pt", "w").close()
logging.FileHandler(out / "best.pt", "w").close()
numpy.memmap(out / "best.pt", dtype="uint8", mode="w+", shape=(8,)).flush()
with open(out / "best.pt", "wb") as file:
    torch.save([1], file)
(fresh / "checkpoint-1").mkdir(parents=True)
(fresh / "best.pt").write_text("new")
shutil.copytree(fresh, out, dirs_exist_ok=True)
shutil.move(str(fresh / "best.pt"), out / "best.pt")
(fresh / "a").write_text("new")
os.renames(fresh / "a", out / "best.pt")
os.chown(out / "best.pt", os.getuid(), os.getgid())
(out / "best.pt").touch()
{train}
"""


@pytest.mark.parametrize("first", [False, True])
def test_no_relative_of_a_saver_changes_an_older_file(
    scripts: Scripts, out: Path, first: bool
) -> None:
    """This holds both before and after the engine is made."""
    makes, trains = "engine = make_engine()", "train(engine)"
    if first:
        makes, trains = "", f"{makes}\n{trains}"
    before = (out / "best.pt").stat()
    scripts.run(RELATIVES.format(out=out, first=first, engine=makes, train=trains)).well()
    after = (out / "best.pt").stat()
    assert (out / "best.pt").read_text() == "old"
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


BEGINS_ANEW = """
import shutil
out = Path("{out}")
shutil.rmtree(out)
os.makedirs(out)
os.makedirs(out / "checkpoint-1" / "shards")
(out / "best.pt").write_text("new")
with open(out / "best.pt", "a") as file:
    file.write("er")
note(read=(out / "best.pt").read_text())
train(make_engine())
"""


def test_a_script_may_begin_in_a_folder_that_it_has_cleared(scripts: Scripts, out: Path) -> None:
    ended = scripts.run(BEGINS_ANEW.format(out=out)).well()
    assert ended.notes() == {"read": "newer"}
    assert (out / "best.pt").read_text() == "old"
    assert ended.log.count("shutil.rmtree did nothing") == 1


PREPARES = """
import shutil
out = Path("{out}")
torch.save([1], out / "data.pt")
torch.save([1], out / "best.pt")
shutil.rmtree(out / "checkpoint-1")
note(read=torch.load(out / "best.pt"))
train(make_engine())
"""


def test_a_script_prepares_files_before_its_engine_and_older_ones_stay(
    scripts: Scripts, out: Path
) -> None:
    ended = scripts.run(PREPARES.format(out=out)).well()
    assert ended.notes() == {"read": [1]}
    assert (out / "data.pt").exists() and (out / "best.pt").read_text() == "old"
    assert (out / "checkpoint-1" / "shards" / "0.pt").exists()


def test_a_run_in_full_length_changes_what_its_script_changes(scripts: Scripts, out: Path) -> None:
    changes = "rmtree(out / 'checkpoint-1')\ntorch.save([1], out / 'best.pt')\ntrain(engine, 2)"
    ended = scripts.run_in_full(BEGINS.format(out=out) + changes)
    assert ended.outcome.ok, ended.log
    assert not (out / "checkpoint-1").exists()
    assert (out / "best.pt").read_bytes() != b"old"


def test_messages_of_a_simulation_are_not_the_users_whatever_the_clock(tmp_path: Path) -> None:
    """Their folder is older than the trial, and a file system's clock may be slow."""
    (tmp_path / "trial").mkdir()
    with tempfile.TemporaryDirectory() as messages:
        files, question = UserFiles(tmp_path / "trial"), Path(messages, "question-000000.json")
        question.touch()
        assert not files.is_scratch(question)
        files.add_scratch(Path(messages))
        assert files.is_scratch(question) and not files.is_to_stay(question)


def test_each_trial_can_create_a_folder_that_must_be_new(scripts: Scripts, out: Path) -> None:
    script = f"""
existing = []
for folder in ({str(out)!r}, {str(out / "run")!r}, {str(out / "run")!r}):
    try:
        os.makedirs(folder)
    except FileExistsError:
        existing.append(folder)
Path({str(out)!r}, "run", "log").write_text("begins")
note(existing=existing)
train(make_engine())
"""
    for _ in range(2):
        ended = scripts.run(script).well()
        assert ended.notes()["existing"] == [str(out), str(out / "run")], "the second time each"


def test_folders_that_a_trial_leaves_empty_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = tmp_path / "trial"
    trial.mkdir()
    files = UserFiles(trial)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".test-") as name:
        user = Path(name)
        for each in ("outputs", "outputs/run", "outputs/run/logs", "kept", "kept/run", "older"):
            (user / each).mkdir()
            if each != "older":
                files.note_created(user / each)
        (user / "kept" / "run" / "file").touch()
        (user / "latest").symlink_to("kept/run")
        files.note_created(user / "latest")
        created = CreatedFolders()
        with caplog.at_level("INFO", logger="dsat"):
            for _ in range(2):
                created.add(trial)
                created.remove_empty()
        assert [message.split()[5] for message in caplog.messages] == [str(user / "kept")]
        assert sorted(path.name for path in user.iterdir()) == ["kept", "latest", "older"]


def test_a_folder_of_several_trials_is_removed_whichever_ends_first(tmp_path: Path) -> None:
    created = CreatedFolders()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".test-") as name:
        shared = Path(name) / "logs"
        for trial in (tmp_path / "first", tmp_path / "second"):
            trial.mkdir()
            for each in (shared, shared / trial.name):
                if not each.exists():
                    each.mkdir()
                    UserFiles(trial).note_created(each)
        for trial in (tmp_path / "second", tmp_path / "first"):
            created.add(trial)
        created.remove_empty()
        assert not shared.exists()
