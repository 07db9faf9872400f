"""Real searches with real ranks: signals to any of their processes, and scripts that misbehave.

What is left is looked for by session, process group and open files, not by environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from testing.command import FAST, Background, command_of, dsat, events_of, experiment_of, inline
from testing.local import PROGRAMS, buffers_of, is_alive
from testing.soak import Tally

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
_OPTIONS = [*FAST, "-mt", "5", "-m", "throughput", "--finals", "0"]
_SCRIPTS = {
    "daemonises": "leaves: daemon",
    "starts a session": "leaves: session",
    "forks workers": "leaves: worker",
    "writes 2 GB of output": "floods",
    "closes its descriptors and catches SystemExit": "is deaf",
    "waits for ever in a collective": "hangs on 1",
    "waits in a collective for a rank that was killed": "is killed on 1",
}
_ROOT = Path(__file__).parents[2]
_REAL, _TRAINER = _ROOT / "benchmarks" / "programs" / "real", "--output_dir out --deepspeed"
# Folders of users' scripts, and what they type there.
_FOLDERS: dict[str, tuple[Path, str]] = {
    "plain": (_ROOT / "examples" / "plain", "-- train.py --deepspeed_config ds_config.json"),
    "core_api": (_ROOT / "examples" / "core_api", "deepspeed.yaml ."),
    "deepspeed_trial": (_ROOT / "examples" / "deepspeed_trial", "deepspeed.yaml ."),
    "hf_trainer": (_ROOT / "examples" / "hf_trainer", "-- train.py --deepspeed ds_config.json"),
    "saves": (PROGRAMS / "saves", "-- train.py --deepspeed --deepspeed_config ds_config.json"),
    "accelerate": (
        PROGRAMS / "accelerated",
        "-- accelerate launch --config_file accelerate.yaml train.py "
        "--per_device_train_batch_size 4",
    ),
    "cifar": (_REAL, "-- deepspeed cifar.py --deepspeed"),
    "glue": (_REAL, f"-- python3 glue.py {_TRAINER} auto.json"),
    "clm": (_REAL, f"-- deepspeed clm.py {_TRAINER} auto.json"),
    "gpt": (_REAL, "-- torchrun --nproc_per_node 1 gpt.py --batch_size 12"),
    "hello": (_REAL, "-- bash hello.sh"),
}
# What scripts open for writing themselves, not through a library's saver: data, hyperparameters.
_BY_THE_SCRIPT = {"gpt": ("data",), "hello": ("experiments",)}


def snapshot(folder: Path) -> dict[str, str]:
    """Digest of each file in a folder, dsat's own run folders left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in ("run", "dsat_runs")
    }


def users_folders(seed: int, count: int) -> Tally:
    """Search in copies of users' folders; afterwards each has the files that it had."""
    rng, tally = random.Random(seed), Tally()
    for name in rng.sample(sorted(_FOLDERS), min(count, len(_FOLDERS))):
        source, words = _FOLDERS[name]
        with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:
            folder = Path(above) / "user"
            shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
            before = snapshot(folder)
            command = [sys.executable, "-m", "dsat", "model", "--engine", "local", "--slots", "1"]
            command += ["-mt", "3", "-m", "throughput", *words.split()]
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            told = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=900,
            )
            after = snapshot(folder)
            changed = [
                path
                for path in sorted(dict(before.items() ^ after.items()))
                if Path(path).parts[0] not in _BY_THE_SCRIPT.get(name, ())
            ]
            finding = f"changed {changed}" if changed else ""
            if told.returncode:
                finding = f"status {told.returncode}: {told.stderr[-600:]}"
            tally.note(f"status {told.returncode}", f"{name}: {finding}" if finding else "")
    return tally


def left_of(run_dir: Path, sessions: set[int]) -> list[str]:
    """Processes and segments of a run that are still there."""
    folder, found = str(run_dir.resolve()), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            groups = {os.getsid(process.pid), os.getpgid(process.pid)}
            files = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")]
            if groups & sessions or any(path.startswith(folder) for path in files):
                found.append(f"{process.pid} {process.name()}")
    return found + buffers_of(run_dir)


def kills(seed: int, count: int) -> Tally:
    """A signal to the tuner, the supervisor or a rank at a seeded moment, then --resume."""
    rng = random.Random(seed)
    tally = Tally()
    while tally.tried < count:
        with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:
            run_dir = Path(above) / "run"
            finding = ""
            resumed = False
            while tally.tried < count and not finding:
                more = ["--resume"] if resumed else []
                command = command_of("asha", "tiny", run_dir, *_OPTIONS, *more)
                ending, finding, over = _harmed(rng, command, run_dir)
                tally.note(ending, f"{seed}/{tally.tried}: {finding}" if finding else "")
                resumed = (run_dir / "journal.jsonl").exists()
                if over:
                    break
            told = dsat("asha", "tiny", run_dir, *_OPTIONS, *(["--resume"] if resumed else []))
            ids = [e["trial_id"] for e in events_of(run_dir) if e["event"] == "finished"]
            if told.status or "Traceback" in told.err or sorted(ids) != list(range(5)):
                tally.findings.append(f"{seed}/{tally.tried}: ends with {told} {ids}")
    return tally


def _harmed(rng: random.Random, command: list[str], run_dir: Path) -> tuple[str, str, bool]:
    before = events_of(run_dir)
    background = Background(command)
    time.sleep(rng.uniform(1.0, 16.0))
    below = background.process.children(recursive=True)
    sessions = {child.pid for child in below}
    role, targets = rng.choice(
        (("tuner", [background.process]), ("supervisor", below[:1]), ("rank", below[1:2]))
    )
    number = rng.choice(_SIGNALS)
    for target in targets:
        with contextlib.suppress(psutil.Error):
            target.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(0.2)
                target.send_signal(signal.SIGCONT)
    # What does not end by it goes on; it has had its harm, and is ended as a user ends it.
    ending = f"{signal.Signals(number).name} to the {role}"
    ended = _wait(background, 2.0)
    if not ended:
        background.process.send_signal(signal.SIGINT)
    told = background.end()
    finding = ""
    if "Traceback" in told.err or told.status == 70:
        finding = f"{ending}: {told.err[-600:]}"
    if events_of(run_dir)[: len(before)] != before:
        finding = f"{ending}: the journal is not what it was"
    deadline = time.monotonic() + 10
    while (left := left_of(run_dir, sessions)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        finding = f"{ending}: left {left}"
    return ending, finding, told.status == 0


def _wait(background: Background, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not is_alive(background.process.pid):
            return True
        time.sleep(0.05)
    return False


def hostile_scripts(seed: int, count: int) -> Tally:
    """Scripts that do what no script should; the run ends with a word, and nothing is left."""
    tally = Tally()
    for name, behaviour in list(_SCRIPTS.items())[:count]:
        with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:
            run_dir = Path(above) / "run"
            own = inline(train_micro_batch_size_per_gpu=2, behaviour=behaviour)
            config = experiment_of(Path(above), "behaviours", hyperparameters=own)
            options = [*FAST[:6], "-mt", "2", "--finals", "0", "--trial-timeout", "60s"]
            told = dsat("asha", "behaviours", run_dir, *options, config=config)
            left = left_of(run_dir, set())
            finding = ""
            if "Traceback" in told.err and "behaviours/train.py" not in told.err:
                finding = told.err[-600:]
            elif left:
                finding = f"left {left}"
            tally.note(f"{name}: status {told.status}", f"{name}: {finding}" if finding else "")
    return tally
