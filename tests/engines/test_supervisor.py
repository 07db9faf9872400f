"""The supervisor, driven by its protocol."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsat.engines.agent.supervisor import MARK
from testing.local import PATIENCE_S, is_alive, launch_request, wait_until

WARM = {"op": "warm", "modules": ["library"], "device": {}}


class Supervised:
    """A supervisor process in a folder from which it can import."""

    def __init__(self, folder: Path, *program: str) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TORCH_WARM_POOL"}
        self.process: Any = subprocess.Popen(
            [sys.executable, *(program or ("-m", "dsat.engines.agent.supervisor"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**env, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        )

    def send(self, request: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.send(request)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline().removeprefix(MARK))
        return answer

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return found


@contextlib.contextmanager
def supervised(folder: Path, *program: str) -> Iterator[Supervised]:
    """Run a supervisor; check that it ends well when its standard input closes."""
    found = Supervised(folder, *program)
    with found.process as process:
        yield found
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


# -- imports


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "import inner",
            "importing inner started threads",
        ),
        (
            "import sys, types\n"
            "class torch: cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
            "sys.modules['torch'] = torch",
            "an import initialised CUDA",
        ),
        # As `torch._inductor.async_compile` of torch 2.4 and 2.7 does.
        (
            "import os, threading\n"
            "if os.environ.get('TORCH_WARM_POOL', '1') == '1':\n"
            "    threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "",
        ),
    ],
    ids=["thread", "CUDA", "compile workers"],
)
def test_what_an_import_does_may_forbid_to_fork(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "library.py").write_text(code)
    (tmp_path / "inner.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    with supervised(tmp_path) as supervisor:
        answer = supervisor.ask(WARM)
    assert answer["event"] == "warm" and answer["reason"].startswith(reason)
    assert bool(answer["reason"]) is bool(reason)


OWNER = """
import subprocess, sys, time
command = [sys.executable, "-m", "dsat.engines.agent.supervisor"]
process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
process.stdin.write('{"op": "warm", "modules": ["library"], "device": {}}\\n')
process.stdin.flush()
time.sleep(2000)
"""


def test_whoever_is_killed_while_it_imports_leaves_no_supervisor(tmp_path: Path) -> None:
    says_so = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
    (tmp_path / "library.py").write_text(f"{says_so}time.sleep(2000)")
    owner = Supervised(tmp_path, "-c", OWNER).process
    found = tmp_path / "pid"
    wait_until(lambda: found.exists() and found.read_text(), "the import")
    owner.kill()
    owner.communicate()
    wait_until(lambda: not is_alive(int(found.read_text())), "the supervisor's end")


# Runs in a child process, as other tests start and end threads.
COUNTS_THREADS = """
import ctypes, threading
from dsat.engines.agent import warm_up

before, counts = warm_up._num_threads(), []
for name in (b"jemalloc_bg_thd", b"another"):
    named, stop = threading.Event(), threading.Event()

    def run():
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME
        named.set()
        stop.wait()

    thread = threading.Thread(target=run)
    thread.start()
    named.wait()
    counts.append(warm_up._num_threads() - before)
    stop.set()
    thread.join()
print(counts)
"""


def test_a_thread_that_goes_round_a_fork_by_itself_is_no_reason_against_it() -> None:
    words = [sys.executable, "-c", COUNTS_THREADS]
    assert subprocess.check_output(words, text=True).strip() == "[0, 1]"


# -- ends of trials, and of the supervisor


def test_a_supervisors_own_resource_tracker_is_no_trials(tmp_path: Path) -> None:
    """A library imported in advance may start the tracker, which must end only with the
    supervisor."""
    (tmp_path / "library.py").write_text(
        "from multiprocessing import resource_tracker\nresource_tracker.ensure_running()\n"
    )
    with supervised(tmp_path) as supervisor:
        supervisor.ask(WARM)
        [tracker] = supervisor.children()
        assert supervisor.ask(launch_request(tmp_path, "/bin/true"))["statuses"] == [0]
        assert is_alive(tracker.pid)
    wait_until(lambda: not is_alive(tracker.pid), "the tracker's end")


@pytest.mark.parametrize("ending", ["by itself", "killed", "interrupted"])
def test_swap_folders_are_removed_however_a_trial_ends(tmp_path: Path, ending: str) -> None:
    """An interrupted dsat closes the pipe of requests; Ctrl-C also reaches the supervisor."""
    swap, theirs = tmp_path / "nvme" / "dsat-1", tmp_path / "nvme" / "dsat-10"
    for folder in (swap, theirs):  # a killed dsat left the folder of the same trial
        folder.mkdir(parents=True)
    writes = f"mkdir {swap}/zero_stage_3; echo x >{swap}/zero_stage_3/x; touch began"
    naps = "" if ending == "by itself" else "; sleep 600"
    request = launch_request(tmp_path, "/bin/sh", "-c", writes + naps)
    with supervised(tmp_path) as supervisor:
        supervisor.send({**request, "swap": [str(swap)]})
        wait_until((tmp_path / "began").exists, "the trial")
        if ending == "killed":
            supervisor.send({"op": "kill", "trial": 0, "grace_s": 0})
        if ending == "interrupted":
            supervisor.process.send_signal(signal.SIGINT)
        else:
            supervisor.process.stdout.readline()
            assert not swap.exists()
    assert not swap.exists()
    assert theirs.exists()


def test_signals_to_the_whole_job_end_no_supervisor_and_ranks_have_their_defaults(
    tmp_path: Path,
) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    with supervised(tmp_path) as supervisor:
        assert supervisor.ask({"op": "ping"}) == {"event": "pong"}
        for own in signals:
            for number in signals:
                supervisor.process.send_signal(number)
            request = launch_request(tmp_path, "/bin/sh", "-c", f"kill -{own} $$")
            assert supervisor.ask(request)["statuses"] == [-own]


UNKILLABLE = """
from dsat.engines.agent import supervisor
supervisor._STUCK_AFTER_S = 0.5
supervisor.leftovers.kill_all = lambda pids: None
supervisor.Supervisor().run()
"""


@pytest.mark.slow
def test_a_supervisor_ends_if_it_cannot_kill_a_process(tmp_path: Path) -> None:
    """SIGKILL has no effect on a process that waits in the kernel for a stuck driver."""
    with supervised(tmp_path, "-c", UNKILLABLE) as supervisor:
        supervisor.send(launch_request(tmp_path, "/bin/sleep", "600"))
        supervisor.send({"op": "kill", "trial": 0, "grace_s": 0})
        assert supervisor.process.wait(PATIENCE_S) == 0
        assert supervisor.process.stdout.read() == b""
