"""Closing a stream, or not reading it, never ends a run; signals end a run cleanly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testing.local import PATIENCE_S

# Does what a run does: prints many lines, opens files, and reports when it reaches its end.
PROGRAM = """
import os, pathlib, sys
from dsat.cli import streams
streams.make_safe()
folder = pathlib.Path(sys.argv[1])
with open(folder / "journal", "w") as journal:
    for number in range(10_000):
        print("line", number, "\\u00b1")
        print("line", number, "\\ud800", file=sys.stderr)
    journal.write(f"{journal.fileno()}")
(folder / "end").write_text("reached")
"""


@pytest.mark.parametrize(
    "redirection",
    ["| head -1 >/dev/null", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"],
)
def test_the_run_goes_on(tmp_path: Path, redirection: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    shell = f'"$0" "$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(["bash", "-c", shell, *command], capture_output=True, check=False)
    assert (ended.returncode, (tmp_path / "end").exists()) == (0, True), ended.stderr[-2000:]
    assert int((tmp_path / "journal").read_text()) > 2, "no file takes the place of a stream"


@pytest.mark.parametrize("module", ["dsat.cli.parser", "dsat.command.ds_config"])
def test_ctrl_c_while_dsat_is_imported_is_an_interruption(module: str) -> None:
    program = (
        "import sys\nfrom importlib.abc import MetaPathFinder\n"
        "class Interrupted(MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == '{module}': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from dsat.cli.main import main\nsys.exit(main(['show']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_ctrl_c_within_a_finalizer_is_an_interruption() -> None:
    """Python ignores exceptions in finalizers, such as those that close connections."""
    program = (
        "import os, signal, sys, time\nfrom dsat.cli import commands, main\n"
        "class Connection:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "def run(*args):\n"
        "    Connection()\n"
        f"    time.sleep({PATIENCE_S})\n"
        "commands.run = run\nsys.exit(main.main(['show']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_a_bug_is_called_a_bug() -> None:
    """Its message has the traceback, without any secrets."""
    program = (
        "import sys\nfrom dsat.cli import commands, main\n"
        "def fails(*args): raise KeyError('x', 'https://me:hunter2@host')\n"
        "commands.prepare_run = fails\n"
        "commands.submit.select_place = lambda settings: type('C', (), {'master': None})\n"
        "sys.exit(main.main(['asha', 'a.yaml', '.']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 70
    assert "this is a bug in dsat 0." in ended.stderr.splitlines()[-1]
    assert "Traceback" in ended.stderr and "in fails" in ended.stderr
    assert "hunter2" not in ended.stderr
