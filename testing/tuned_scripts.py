"""Scripts of the catalogue, tuned as their users would tune them.

    python -m testing.tuned_scripts [SCRIPT ...] [--launchers NAME ...] [--ranks N ...]

`make frameworks` first installs TRL, PEFT and datasets into a folder of the environment that only
these searches see, as transformers imports them if it finds them. A framework with its own files is
installed in `.cache/own_commands`, in versions that fit together, and without packages that the
environment has. The training command that its search prints is run to its end.

Prints a row of a table for each script. Returns 1 if a script was not tuned, or if its folder was
changed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsat.run.run import Run
from dsat.values.outcome import OutcomeKind
from testing import slurm
from testing.catalogue import FRAMEWORKS, LAUNCHERS, ROOT, SCRIPTS, SRUN, Script, of_suite
from testing.command import run_of
from testing.packages import install
from testing.printed import printed_in

_BESIDE = Path(sys.prefix) / "frameworks"
DSAT = (sys.executable, "-m", "dsat")
OPTIONS = "--max-trials 4 --finals 0 --memory-model formula -m throughput --zero-stages 1 2"
OPTIONS += " --max-micro-batch 8 --end-profile-step 4 --max-profile-steps 4 --run-dir run"
_PATIENCE_S = 900


@dataclass(frozen=True)
class Tuned:
    """A finished search, and the changes that it made to its folder.

    Attributes:
        changed: paths that are new, gone or different, without the run's folder and
            `Script.prepares`.
    """

    status: int
    out: str
    err: str
    folder: Path
    changed: tuple[str, ...]

    @property
    def run(self) -> Run:
        return run_of(self.folder / "run")


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Return checksum (or link target), size and time of each path in a folder, without the run."""
    found = {}
    for path in folder.rglob("*"):
        name, info = path.relative_to(folder), path.lstat()
        if name.parts[0] == "run" or "__pycache__" in name.parts:
            continue
        if path.is_symlink():
            found[str(name)] = (os.readlink(path), 0, info.st_mtime_ns)
        elif path.is_dir():  # its time changes with the files in it
            found[str(name)] = ("folder", 0, 0)
        else:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(name)] = (digest, info.st_size, info.st_mtime_ns)
    return found


def prepare(script: Script, folder: Path, launcher: str, ranks: int) -> list[str]:
    """Copy a script's files into a folder, and return the command that starts it there."""
    folder.mkdir(parents=True)
    if script.folder is not None:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(script.folder, folder, ignore=ignored, dirs_exist_ok=True)
    for name, text in script.files.items():
        (folder / name).write_text(text)
    if script.make:
        make = [sys.executable, *script.make.split()]
        subprocess.run(make, cwd=folder, check=True, capture_output=True)
    command = script.typed(launcher, ranks, packages_of(script))
    if launcher != "bash run.sh":
        return command
    (folder / "run.sh").write_text(f"set -e\n{shlex.join(command)}\n")
    return ["bash", "run.sh"]


def is_installed(needs: str) -> bool:
    """Return whether the package that a script needs is installed, here or in `_BESIDE`."""
    return not needs or importlib.util.find_spec(needs) is not None or (_BESIDE / needs).exists()


def packages_of(script: Script) -> Path:
    """Return the folder with the further packages that a script needs."""
    return install(script.packages) if script.packages else _BESIDE


def environment(packages: Path = _BESIDE) -> dict[str, str]:
    """Return the variables of a user whose further packages are in a folder."""
    path = [packages / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]),
        "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory rejects later versions
        "DS_ACCELERATOR": "cpu",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def tune(
    script: Script,
    folder: Path,
    launcher: str = "",
    ranks: int = 1,
    *,
    start: Sequence[str] = DSAT,
    job: Mapping[str, str] | None = None,
) -> Tuned:
    """Tune a script in a copy of its folder.

    Args:
        folder: the folder of the copy.
        launcher: a key of `LAUNCHERS`; by default the script's first one.
        start: the command that replaces `dsat`.
        job: variables of a Slurm job.
    """
    command = prepare(script, folder, launcher or script.launchers[0], ranks)
    before = snapshot(folder)
    options = [*OPTIONS.split(), *script.options.split()]
    done = subprocess.run(
        [*start, script.method, *options, "--", *command],
        cwd=folder,
        env={**environment(packages_of(script)), **(job or {}), **script.variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
    )
    after = snapshot(folder)
    names = {name for name in before | after if before.get(name) != after.get(name)}
    names -= {name for part in script.prepares for name in fnmatch.filter(after, part)}
    return Tuned(done.returncode, done.stdout, done.stderr, folder, tuple(sorted(names)))


def fault_of(script: Script, told: Tuned) -> str:
    """Return how a search differs from what the catalogue expects; "" if it does not."""
    if told.changed:
        return f"its folder was changed: {', '.join(told.changed)}"
    fails = script.fails
    if fails is not None:
        lost = [word for word in fails.words if word not in told.err]
        wrong = told.status != fails.status or lost or "dsat/cli/main.py" in told.err
        return f"status {told.status}, {lost} is not in: {told.err}" if wrong else ""
    if told.status:
        return f"status {told.status}: {told.err.strip()[-600:]}"
    run = told.run
    lost = [
        f"{trial.name}: {run.outcomes[trial.id].message}"
        for trial in run.trials.values()
        if run.outcomes[trial.id].kind is not OutcomeKind.OK
    ]
    if lost:
        return f"{len(lost)} of {len(run.trials)} trials were lost: {lost[0]}"
    if len({trial.batch for trial in run.trials.values()}) == 1:
        return f"{len(run.trials)} trials of the same batch"
    return ""


def fault_of_answer(script: Script, told: Tuned) -> str:
    """Return what is wrong with the changed copy of a framework's file, or with training by it."""
    best = told.run.best
    assert best is not None
    copy = (told.folder / "run" / "best_files" / script.own_file).read_text()
    wanted = f"{script.batch_key}: {best.batch.micro_batch}  # what fits"
    if wanted not in copy or "best_ds_config.json" not in copy:
        return f"the copy of its file is {copy}"
    line = printed_in(told.folder / "run")
    env = environment(packages_of(script)) | dict(script.variables)
    trained = subprocess.run(
        ["bash", "-c", line], cwd=Path.home(), env=env, capture_output=True, text=True, check=False
    )
    end = trained.stderr.strip()[-600:]
    return f"{line}\nended with {trained.returncode}: {end}" if trained.returncode else ""


def fault_of_statements(script: Script, told: Tuned) -> str:
    """Return what is wrong with the verdict on a script that prints how it trained.

    The printed command must train as many steps as the user's own, with the best micro batch.
    """
    if script.fails is not None or told.changed:
        return fault_of(script, told)
    if told.status or not re.search(script.says, told.out + told.err):
        return f"status {told.status}, {script.says!r} is not in: {told.out} {told.err}"
    plain = told.folder.with_name("plain")
    own = prepare(script, plain, script.launchers[0], script.most_ranks)
    own_steps, _ = _trained(shlex.join(own), plain)
    log = told.folder / "run" / "full" / "stdout.log"
    steps, fed = _trained(printed_in(told.folder / "run"), told.folder, log)
    best = told.run.best
    if best is None or (steps, fed) != (own_steps, best.batch.micro_batch):
        return f"{own_steps} steps become {steps} of micro batch {fed}: {told.out}"
    return ""


def _trained(line: str, folder: Path, log: Path | None = None) -> tuple[int, int]:
    """Run a training command; return the steps and the micro batch that its script prints."""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
    )
    said = done.stdout + (log.read_text() if log is not None and log.exists() else "")
    found = re.search(r"trained (\d+) steps of micro batch (\d+)", said)
    if done.returncode or found is None:
        raise AssertionError(f"{line} ended with {done.returncode}: {done.stderr[-600:]}")
    return int(found[1]), int(found[2])


def documented_commands() -> dict[str, tuple[str, list[str]]]:
    """Return the documented commands, by title: the folder and the arguments of `dsat`."""
    found, example = {}, r"^\| \[(\w+)\].*`(?:python3 -m )?dsat (\w+ .*)` \|$"
    for name, line in re.findall(example, (ROOT / "examples/README.md").read_text(), re.M):
        found[name] = (f"examples/{name}", shlex.split(line))
    for page in ("deepspeed", "trainer", "determined"):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for section in re.split(r"^#{1,2} ", text, flags=re.M)[1:]:
            command = r"^```(?:sh)?\ncd (\S+)\n(?:python3 -m )?dsat (.*?)\n```"
            block = re.search(command, section, re.M | re.S)
            if block is not None:
                found[section.splitlines()[0]] = (block[1], shlex.split(block[2]))
    return found


def main() -> int:
    """Print the table; return 1 if something was not tuned."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [script.name for script in of_suite(FRAMEWORKS)]
    parser.add_argument("scripts", nargs="*", default=names, metavar="SCRIPT")
    here = [name for name in LAUNCHERS if name != SRUN or not slurm.missing()]
    parser.add_argument("--launchers", nargs="*", default=here, choices=LAUNCHERS)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    given = parser.parse_args()
    if unknown := set(given.scripts) - SCRIPTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    columns = list(itertools.product(given.launchers, given.ranks))
    head = ["script", *(f"{launcher}, {ranks}" for launcher, ranks in columns)]
    rows, faults = [head, ["---"] * len(head)], list[str]()
    with contextlib.ExitStack() as stack:
        job: Mapping[str, str] = {}
        if SRUN in given.launchers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cluster = stack.enter_context(slurm.running(folder, 1, cpus=max(given.ranks)))
            job = stack.enter_context(cluster.allocation(1, "--exclusive"))
        for name in given.scripts:
            rows.append([name])
            for launcher, ranks in columns:
                cell = "-"
                if SCRIPTS[name].can_start(launcher, ranks):
                    fault = _fault(SCRIPTS[name], launcher, ranks, job if launcher == SRUN else {})
                    cell = f"see {len(faults) + 1}" if fault else "tuned"
                    faults += [f"{len(faults) + 1}. {fault}"] if fault else []
                rows[-1].append(cell)
    print(*(f"| {' | '.join(row)} |" for row in rows), *faults, sep="\n")
    return int(bool(faults))


def _fault(script: Script, launcher: str, ranks: int, job: Mapping[str, str]) -> str:
    what, began = f"{script.name}, {launcher}, {ranks} ranks", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dsat-scripts-") as above:
        told = tune(script, Path(above) / "work", launcher, ranks, job=job)
        fault = fault_of(script, told)
        if not fault and script.own_file and (launcher, ranks) == ("python", 1):
            fault = fault_of_answer(script, told)
    print(f"{what}: {fault or 'tuned'} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
    return f"{what}: {fault}" if fault else ""


if __name__ == "__main__":
    sys.exit(main())
