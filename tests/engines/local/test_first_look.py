"""A script's first look tells its own errors, and changes nothing."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsat.cli.main import main
from dsat.engines.local import first_look
from dsat.engines.local.first_look import FirstLook
from dsat.errors import ScriptFailed
from dsat.in_trial import start_recorder
from dsat.inputs import experiment as experiments
from dsat.inputs.entrypoint import Entrypoint
from testing.local import is_alive, wait_until

RUNNING = first_look._running  # the real one


@pytest.fixture(autouse=True)
def _a_core_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(first_look, "_running", lambda: 1)


@pytest.mark.parametrize(("cores", "running"), [(1, 1), (2, 2), (8, 9)])
def test_there_is_none_without_a_core_to_spare(
    cores: int, running: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(first_look, "_running", lambda: running)
    assert look_at(tmp_path, "undefined") is None


def test_this_thread_is_among_those_that_run() -> None:
    assert RUNNING() >= 1


def look_at(folder: Path, script: str, *args: str, **more: object) -> FirstLook | None:
    """At a script in a folder, which is made if need be."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    program = Entrypoint(script="train.py", args=args, **more)  # type: ignore[arg-type]
    experiment = experiments.of_command(["python3", "train.py", *args], "train", folder, None)
    return FirstLook.at(experiment, program)


def told(look: FirstLook | None) -> ScriptFailed | None:
    """The error that it tells in the end, if any."""
    assert look is not None
    process = look._process
    while True:
        over = process.poll() is not None
        try:
            look.check()
        except ScriptFailed as error:
            return error
        if over:
            return None
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("for", "SyntaxError: "),
        ("print(undefined)", "NameError: name 'undefined' is not defined"),
        ("open('data.bin')", "FileNotFoundError: "),
        ("import argparse; argparse.ArgumentParser().parse_args()", "exit status 2"),
    ],
)
def test_what_no_trial_would_be_without_is_told(script: str, message: str, tmp_path: Path) -> None:
    error = told(look_at(tmp_path, script, "--lr", "3"))
    assert error is not None
    assert message in str(error)
    assert str(error).startswith("your script failed before it called deepspeed.initialize")
    log = Path(str(error).partition("Its log is ")[2])
    assert error.detail
    assert log.read_text().strip().endswith(error.detail.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "script",
    [
        "raise KeyError('a setting that a trial has')",
        "import sys; sys.exit(1)",
        "import os; os._exit(3)",
        "import os; os.abort()",
        "assert 'a device' == ''",
        "import types, sys; sys.modules['determined'] = types; from os import no_such_name",
    ],
)
def test_what_a_trial_may_be_without_is_not(script: str, tmp_path: Path) -> None:
    assert told(look_at(tmp_path, script)) is None


CHANGES = """
open('made', 'w').write('x')
import os; os.mkdir('made')
import pathlib; pathlib.Path('made').touch()
import os; os.close(os.open('made', os.O_CREAT | os.O_WRONLY))
import subprocess, sys; subprocess.run(['touch', 'made'])
import os; os.system('touch made')
import shutil; shutil.copyfile('train.py', 'made')
import os; os.rename('train.py', 'made')
import os; os.symlink('train.py', 'made')
import os; os.fork() or open('made', 'w')
import sqlite3; sqlite3.connect('made').execute('create table a (b)')
import socket; socket.create_connection(('127.0.0.1', 9))
import tempfile; tempfile.mkdtemp(dir='.', prefix='made')
import json, own
""".strip().splitlines()


@pytest.mark.parametrize("change", CHANGES)
def test_it_ends_before_anything_is_changed(change: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("open('made', 'w').close()\n")
    assert told(look_at(tmp_path, f"{change}\nundefined")) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.py", "train.py"]


def test_what_a_library_does_while_it_is_imported_is_let_through(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "library.py").write_text("open('cache', 'w').close()\ndef work():\n    pass\n")
    script = f"import sys; sys.path.append({str(packages)!r})\nimport library\nundefined\n"
    assert "NameError" in str(told(look_at(tmp_path, script)))
    (packages / "library.py").write_text("def work():\n    open('cache2', 'w').close()\n")
    assert told(look_at(tmp_path, script.replace("undefined", "library.work()\nundefined"))) is None
    assert not (tmp_path / "cache2").exists()
    (packages / "library.py").write_text("import os; os.open('lock', os.O_CREAT | os.O_EXCL)\n")
    assert told(look_at(tmp_path, script)) is None
    assert not (tmp_path / "lock").exists()


def test_it_ends_where_the_training_would_begin(tmp_path: Path) -> None:
    for module, function in (
        ("deepspeed", "initialize"),
        ("torch.cuda", "_lazy_init"),
        ("torch.serialization", "save"),
    ):
        package, _, name = module.partition(".")
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
        path = tmp_path / package / f"{name or '__init__'}.py"
        path.write_text(f"def {function}():\n    undefined\n")
        assert told(look_at(tmp_path, f"import {module}; {module}.{function}()")) is None


def test_its_environment_is_a_ranks(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DSAT_TRIAL_DIR")
    script = f"import os, sys\nif all(map(os.environ.get, {names!r})): undefined\n"
    script += "assert sys.argv[1:] == ['--local_rank=0', '--lr', '3']\n"
    assert "NameError" in str(told(look_at(tmp_path, script, "--lr", "3", passes_local_rank=True)))


@pytest.mark.parametrize(
    "more",
    [
        {"python_options": ("-I",)},
        {"interpreter": "/usr/bin/python3"},
        {"hosts": (("node1", ()),)},
        {"script": "", "trial_class": "train:Trial"},
    ],
)
def test_where_it_could_not_be_ended_or_tells_nothing_there_is_none(
    more: dict[str, object], tmp_path: Path
) -> None:
    experiment = experiments.of_command(["python3", "train.py"], "train", tmp_path, None)
    program = Entrypoint(**{"script": "train.py", **more})  # type: ignore[arg-type]
    assert FirstLook.at(experiment, program) is None


def test_nothing_is_left_of_one_that_is_ended_or_forgotten(tmp_path: Path) -> None:
    for forget in (False, True):
        look = look_at(tmp_path, "input_ = 1\nimport time; time.sleep(600)\n")
        assert look is not None
        look.check()
        process, folder = look._process, look._folder
        if forget:
            del look
            gc.collect()
        else:
            look.end()
            look.check()
        assert process.returncode is not None
        assert not folder.exists()


def test_without_its_guard_nothing_is_run(tmp_path: Path) -> None:
    shutil.copyfile(start_recorder.__file__, tmp_path / "sitecustomize.py")
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        start_recorder.FOLDER_VARIABLE: str(tmp_path),
        start_recorder.CAREFUL_VARIABLE: "no number, so that the guard cannot be set",
    }
    script = [sys.executable, "-c", "open('made', 'w')"]
    ended = subprocess.run(script, cwd=tmp_path, env=env, check=False)
    assert ended.returncode == start_recorder.RECORDED_STATUS
    assert not (tmp_path / "made").exists()


def test_it_ends_when_dsat_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('here', flush=True)\nimport time; time.sleep(600)\n")
    begin = (
        "import os, time\nfrom pathlib import Path\n"
        "from dsat.engines.local.first_look import FirstLook\n"
        "from dsat.inputs import experiment as experiments\n"
        "from dsat.inputs.entrypoint import Entrypoint\n"
        "from dsat.engines.local import first_look\n"
        "os.sched_getaffinity, first_look._running = lambda _: {0, 1}, lambda: 1\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "own = experiments.of_command(['python3', 'train.py'], 'train', folder, None)\n"
        "look = FirstLook.at(own, Entrypoint(script='train.py'))\n"
        "print(look._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    command, env = [sys.executable, "-c", begin], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as dsat:
        assert dsat.stdout is not None
        pid = int(dsat.stdout.readline())
        [log] = tmp_path.glob("dsat-*/stdout.log")
        wait_until(lambda: log.read_text() == "here\n", "the script's first line", 30)
        dsat.kill()
    wait_until(lambda: not is_alive(pid), "its end", 10)


def test_a_search_tells_it_before_anything_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import no_such_module\nimport torch, deepspeed\n")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    monkeypatch.chdir(tmp_path)
    assert main("asha -- python3 train.py --deepspeed_config ds.json".split()) == 1
    *detail, last = capsys.readouterr().err.strip().splitlines()
    assert "No module named 'no_such_module'. Its log is " in last
    assert detail[-1] == "ModuleNotFoundError: No module named 'no_such_module'"
    assert not any("importing torch" in line for line in detail)
    assert not (tmp_path / "dsat_runs").exists()
