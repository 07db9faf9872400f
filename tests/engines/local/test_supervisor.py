"""The supervisor by its protocol."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dsat.engines.local import warm_up
from testing.local import PATIENCE_S, is_alive, wait_until

# As `torch._inductor.async_compile` of torch 2.4 and 2.7 does.
WARMS_A_POOL = """
import os, threading
if os.environ.get("TORCH_WARM_POOL", "1") == "1":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
STARTS_A_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def warmed(folder: Path, code: str, **environment: str) -> tuple[dict[str, Any], str]:
    """What the supervisor answers after it has imported a module, and what it printed."""
    (folder / "library.py").write_text(code)
    plain = {key: value for key, value in os.environ.items() if key != "TORCH_WARM_POOL"}
    path = os.pathsep.join([str(folder), *sys.path])
    found = subprocess.run(
        [sys.executable, "-m", "dsat.engines.local.supervisor"],
        input=json.dumps({"op": "warm", "modules": ["library"], "device": {}}) + "\n",
        env={**plain, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return json.loads(found.stdout.removeprefix("dsat-answer ")), found.stderr


@pytest.mark.slow
def test_an_import_that_starts_a_thread_forbids_to_fork(tmp_path: Path) -> None:
    answer, _ = warmed(tmp_path, STARTS_A_THREAD)
    assert (answer["ok"], answer["reason"]) == (False, "an import started threads")


def test_an_import_that_initialises_cuda_forbids_to_fork(tmp_path: Path) -> None:
    torch = "cuda = types.SimpleNamespace(is_initialized=lambda: True)"
    stands_for_it = f"import sys, types\nclass torch: {torch}\nsys.modules['torch'] = torch"
    answer, _ = warmed(tmp_path, stands_for_it)
    assert (answer["ok"], answer["reason"]) == (False, "an import initialised CUDA")


def test_torch_starts_no_compile_workers_in_advance(tmp_path: Path) -> None:
    answer, _ = warmed(tmp_path, WARMS_A_POOL)
    assert answer["ok"], answer


OWNER = """
import subprocess, sys, time
command = [sys.executable, "-m", "dsat.engines.local.supervisor"]
process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
process.stdin.write('{"op": "warm", "modules": ["library"], "device": {}}\\n')
process.stdin.flush()
time.sleep(2000)
"""


def test_whoever_is_killed_while_it_imports_leaves_no_supervisor(tmp_path: Path) -> None:
    says_so = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
    (tmp_path / "library.py").write_text(f"{says_so}time.sleep(2000)")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=tmp_path, env=env)
    found = tmp_path / "pid"
    wait_until(lambda: found.exists() and found.read_text(), "the import")
    owner.kill()
    owner.wait()
    wait_until(lambda: not is_alive(int(found.read_text())), "the supervisor's end")


def test_a_thread_that_goes_round_a_fork_by_itself_is_no_reason_against_it() -> None:
    named, stop = threading.Event(), threading.Event()

    def run(name: bytes) -> None:
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME
        named.set()
        stop.wait(PATIENCE_S)

    counts = []
    before = warm_up._num_threads()
    for name in (b"jemalloc_bg_thd", b"another"):
        thread = threading.Thread(target=run, args=(name,))
        thread.start()
        named.wait(PATIENCE_S)
        counts.append(warm_up._num_threads() - before)
        stop.set()
        thread.join()
        named.clear()
        stop.clear()
    assert counts == [0, 1]
