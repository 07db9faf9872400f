"""The first 20 minutes with a GPU: what a CUDA without a device cannot tell.

    python -m benchmarks.gpu.first_minutes FOLDER [--part 1|2|3] [--steps NAME ...] [--short]

Each step is independent, prints a line for each finding, and writes `FOLDER/STEP.json`; what trials
measured (their `metrics.json`, and the allocator's `memory_stats.json`) is kept below
`FOLDER/STEP`. A part takes at most 10 minutes: a step that would begin later is left for another
call. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import run_trial
from benchmarks.gpu import predicted_memory
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import LocalOptions
from dsat.engines.local.machine import Machine, find_machine, problems_with
from dsat.engines.local.supervisors import Supervisors
from dsat.in_trial.rank_files import METRICS_FILE
from dsat.inputs import entrypoint, experiment
from dsat.tuning.journal import FILE_NAME, read_events
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAM = Path(__file__).with_name("loop.py")
_PART_S = 600.0
_STATS_FILE = "memory_stats.json"
_MIB = 2**20


class StepFailed(Exception):
    """What was seen is not what must be."""


@dataclass
class Report:
    """What a step finds.

    Attributes:
        folder: for what it leaves.
        machine: the slots.
        short: only so much as shows that the step runs.
        engines: what trials run on.
    """

    folder: Path
    machine: Machine
    short: bool
    engines: Engines
    findings: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        self.findings[name] = value
        print(f"  {name}: {value}", flush=True)

    def check(self, name: str, right: bool, value: Any = "") -> None:
        """Notes a finding that must be so.

        Raises:
            StepFailed: it is not.
        """
        self.note(name, value if value != "" else right)
        if not right:
            raise StepFailed(f"{name}: {value}")

    def run(self, name: str, trial: Trial, *words: str, cold: bool = False, slots: int = 1) -> None:
        """Runs a trial of the small program with these words, which must succeed, and keeps what
        it measured."""
        engine = self.engines.get(*words, slots=slots, cold=cold)
        self.keep(name, trial, run_trial(engine, trial))

    def keep(self, name: str, trial: Trial, outcome: Outcome) -> None:
        """Notes what came of a trial, which must have succeeded, and keeps what it measured."""
        for file in (METRICS_FILE, _STATS_FILE):
            for found in self.engines.folder.glob(f"*/trials/{trial.name}/{file}"):
                shutil.copy(found, self.folder / f"{name.replace(' ', '-')}.{file}")
        self.check(name, outcome.ok, _line(outcome))


# -- the steps


def devices(report: Report) -> None:
    """Slots by default, by id, by UUID and without any; what the machine has (D16)."""
    for tool, options in (("nvidia-smi", ["-L"]), ("nvcc", ["--version"])):
        path = shutil.which(tool)
        text = "" if path is None else _output([path, *options])
        report.note(tool, text.strip().splitlines()[-1:] or "not there")
    report.note("machine", report.machine.describe())
    for warning in report.machine.warnings:
        report.note("warning", warning)
    last = report.machine.devices[-1]
    chosen = [last, *_uuids()[-1:]]
    for device in chosen[: 1 if report.short else None]:
        found = _in_environment({"CUDA_VISIBLE_DEVICES": device})
        report.check(f"CUDA_VISIBLE_DEVICES={device}", found.devices == (device,), found.devices)
    began_s = time.monotonic()
    problems = problems_with(report.machine, range(report.machine.num_slots))
    report.check("all slots answer", not problems, problems or "")
    report.note("asking them took (s)", round(time.monotonic() - began_s, 1))


def forks(report: Report) -> None:
    """Ranks forked from a warm process, with NVML and without it (D2, D3)."""
    for name, env in (("with NVML", {}), ("NVML hidden", _without_nvml(report.folder))):
        supervisors = Supervisors([Host(report.machine)], report.folder, env=env)
        began_s = time.monotonic()
        try:
            reason = supervisors.warm_up()
        finally:
            supervisors.close()
        if name == "with NVML":  # without it torch may have to initialise CUDA to look for it
            report.check(name, not reason, reason or "ranks can be forked")
        else:
            report.note(name, reason or "ranks can be forked")
        report.note(f"{name}, warm-up (s)", round(time.monotonic() - began_s, 1))


def simulations(report: Report) -> None:
    """`estimate --exact` on the examples; nothing of it may touch the device (D1, D9, D20)."""
    has_transformers = importlib.util.find_spec("transformers") is not None
    if not has_transformers:
        report.note("hf_trainer", "left out: transformers is not installed")
    both = not report.short and has_transformers
    for name in ("plain", "hf_trainer") if both else ("plain",):
        words = ["python3", "train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]
        if name == "hf_trainer":
            words = ["python3", "train.py", "--deepspeed", "ds_config.json"]
        options = ["--slots", "1", *([] if report.short else ["--exact"])]
        status, out = _dsat(["estimate", *options, "--", *words], EXAMPLES / name)
        (report.folder / f"{name}.txt").write_text(out)
        last = out.strip().splitlines()[-1:]
        simulated = not re.search("simulation died|by formula:", out)
        report.check(f"estimate {name}", status == 0 and simulated, last)


def search(report: Report) -> None:
    """A search with a limit: who runs out of memory, and how far off the prediction is (D4, D8)."""
    run = report.folder / "run"
    options = ["--max-trials", "3" if report.short else "16", "--slot-memory", "4GiB", "--json"]
    if report.short:
        options += ["--start-profile-step", "2", "--end-profile-step", "3"]
        options += ["--max-profile-steps", "3", "--memory-model", "formula"]
    script = "python3 train.py --deepspeed --deepspeed_config ds_config.json".split()
    words = ["model", "--run-dir", str(run.resolve()), *options, "--", *script]
    status, out = _dsat(words, EXAMPLES / "plain")
    report.check("search ended", status == 0, out.strip().splitlines()[-1:] if status else status)
    searched = Run(read_events(run / FILE_NAME))
    kinds = collections.Counter(outcome.kind.value for outcome in searched.outcomes.values())
    report.note("outcomes", dict(kinds))
    if searched.memory_basis is not None:
        for one in predicted_memory.of_run(searched):
            report.note(f"{one.trial.name}, predicted", f"{one.errors[0]:+.2%} of what it used")
    for path in sorted(run.glob("trials/*/metrics.json")):
        memory = json.loads(path.read_text()).get("memory") or {}
        allocated, reserved = (
            max((memory.get(kind) or {}).values(), default=0)
            for kind in ("allocated_bytes", "reserved_bytes")
        )
        context = memory.get("context_bytes", 0)
        report.note(
            path.parent.name,
            f"allocated {allocated / _MIB:.0f}, reserved {reserved / _MIB:.0f}, "
            f"context {context / _MIB:.0f} MiB",
        )
    shutil.copytree(run / "trials", report.folder / "trials", dirs_exist_ok=True)


def starts(report: Report) -> None:
    """One configuration warm and cold: the same figures, and how long a trial takes."""
    for cold in (False, True):
        for number in (1,) if report.short else (1, 2, 3):
            report.run(f"{'cold' if cold else 'warm'} {number}", _trial(), cold=cold)


def operators(report: Report) -> None:
    """DeepSpeed's own Adam is compiled; a compiler that was killed holds up nobody (D13)."""
    if shutil.which("nvcc") is None:
        report.note("left out", "no nvcc")
        return
    os.environ["TORCH_EXTENSIONS_DIR"] = str((report.folder / "extensions").resolve())
    engine, killed = report.engines.get(), _trial(optimizer=_OWN_ADAM)
    engine.launch(killed)
    engine.poll(20.0)
    engine.cancel(killed.id)
    while not engine.poll(10.0):
        pass
    report.run("after a kill", _trial(optimizer=_OWN_ADAM))


def offload(report: Report) -> None:
    """What an offloaded optimizer takes of the host, and what threads are worth (D5, D7)."""
    if shutil.which("nvcc") is None:
        report.note("left out", "no nvcc: DeepSpeed compiles CPUAdam with CUDA's headers")
        return
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    for threads in ("1", ""):
        os.environ.pop("OMP_NUM_THREADS", None)
        if threads:
            os.environ["OMP_NUM_THREADS"] = threads
        trial = _trial(stage=2, zero_optimization=offloaded, optimizer=_OWN_ADAM)
        report.run(f"{threads or 'all'} threads", trial)
    os.environ.pop("OMP_NUM_THREADS", None)


def memory_back(report: Report) -> None:
    """A process with most of the memory is killed, and a trial that needs more than was left starts
    at once (D17)."""
    code = (
        "import sys, time, torch\n"
        "free, _ = torch.cuda.mem_get_info()\n"
        f"kept = torch.empty(free - {_LEFT_BYTES}, dtype=torch.uint8, device='cuda')\n"
        "print('has it', flush=True)\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", code]
    report.engines.get(*_LARGE)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hog:
        assert hog.stdout is not None
        report.check("memory was taken", hog.stdout.readline().strip() == "has it")
        hog.send_signal(signal.SIGKILL)
        report.run("trial at once", _trial(), *_LARGE)


def precisions(report: Report) -> None:
    """fp16, whose first steps are skipped, and bf16."""
    for name in ("bf16",) if report.short else ("bf16", "fp16"):
        precision: dict[str, Any] = {name: {"enabled": True}}
        report.run(name, _trial(**precision))


def compiled(report: Report) -> None:
    """`engine.compile()`: the steps in which torch compiles are not measured."""
    if report.short:
        report.note("left out", "kernels for devices that compute nothing cannot be compiled")
        return
    report.run("written", _trial())
    report.run("compiled", _trial(), "--compile")


def side_by_side(report: Report) -> None:
    """With two GPUs: a trial alone against beside another, and one of two ranks (D6, D14)."""
    if report.machine.num_slots < 2:
        report.note("left out", "one GPU")
        return
    if not report.short:
        report.run("alone", _trial())
    engine, both = report.engines.get(), [_trial(), _trial()]
    for trial in both:
        engine.launch(trial)
    ended: dict[int, Outcome] = {}
    while len(ended) < len(both):
        ended.update(engine.poll(30.0))
    for number, trial in enumerate(both, start=1):
        report.keep(f"beside {number}", trial, ended[trial.id])
    report.run("two ranks", _trial(ranks=2), slots=2)


STEPS: Mapping[str, tuple[int, Callable[[Report], None]]] = {
    "devices": (1, devices),
    "forks": (1, forks),
    "simulations": (1, simulations),
    "search": (1, search),
    "starts": (2, starts),
    "operators": (2, operators),
    "offload": (2, offload),
    "memory_back": (3, memory_back),
    "precisions": (3, precisions),
    "compiled": (3, compiled),
    "side_by_side": (3, side_by_side),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", type=int, choices=(1, 2, 3))
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), metavar="NAME")
    parser.add_argument("--short", action="store_true", help="only see that each step runs")
    arguments = parser.parse_args(argv)
    parts = (arguments.part,) if arguments.part else (1, 2, 3)
    names = arguments.steps or [name for name, (part, _) in STEPS.items() if part in parts]
    machine = find_machine()
    briefly: dict[str, Any] = {"warm_up_s": 0.1, "measured_s": 0.1} if arguments.short else {}
    options = TrialOptions(timeout_s=240.0, max_steps=6, **briefly)
    engines = Engines(machine, arguments.folder / "engines", options)
    began_s, failed = time.monotonic(), []
    for name in names:
        if time.monotonic() - began_s > _PART_S:
            print(f"{name}: left for another call, {_PART_S / 60:g} minutes are over")
            continue
        folder = arguments.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        report = Report(folder, machine, arguments.short, engines)
        print(f"{name}: {STEPS[name][1].__doc__}", flush=True)
        step_began_s = time.monotonic()
        try:
            STEPS[name][1](report)
        except Exception as error:
            failed.append(name)
            report.note("failed", f"{type(error).__name__}: {error}")
            (folder / "traceback.txt").write_text(traceback.format_exc())
            engines.close()  # what a device does after a failure is no matter of the next step
        report.note("took (s)", round(time.monotonic() - step_began_s, 1))
        text = json.dumps(report.findings, indent=1, default=str) + "\n"
        (arguments.folder / f"{name}.json").write_text(text)
    engines.close()
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


# -- what they share


class _Plain(argparse.RawDescriptionHelpFormatter):
    pass


class Engines:
    """Local engines for the small program beside this file, made when they are first asked for and
    shared by the steps.

    Args:
        machine: the slots.
        folder: for what trials leave.
        options: how trials are measured.
    """

    def __init__(self, machine: Machine, folder: Path, options: TrialOptions) -> None:
        self.folder = folder
        self._options = options
        self._machine = machine
        self._open: dict[tuple[tuple[str, ...], int, bool], LocalEngine] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def get(self, *words: str, slots: int = 1, cold: bool = False) -> LocalEngine:
        """The engine whose trials have so many slots, and fresh processes or not.

        Args:
            words: for the program's command line.
        """
        if (words, slots, cold) not in self._open:
            run = self.folder / f"{len(list(self.folder.glob('*')))}-{slots}"
            run.mkdir(parents=True)
            adam = {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}}
            base = {"optimizer": adam, "zero_optimization": {"stage": 1}}
            command = [sys.executable, str(PROGRAM), "--deepspeed_config", "ds_config.json", *words]
            (run / "ds_config.json").write_text(json.dumps(base))
            self._open[words, slots, cold] = LocalEngine(
                experiment.of_command(command, "first minutes", run, base),
                entrypoint.parse(command, run),
                [Host(self._machine)],
                run,
                LocalOptions(self._options, cold=cold),
                slots_per_trial=slots,
            )
        return self._open[words, slots, cold]

    def close(self) -> None:
        for engine in self._open.values():
            engine.close()
        self._open.clear()


_numbers = itertools.count()
# What a process leaves of a device's memory, and a model whose states need more: 67 million
# parameters of 16 bytes.
_LEFT_BYTES, _LARGE = 768 * _MIB, ("--width", "4096")
_OWN_ADAM = {"params": {"torch_adam": False}}  # DeepSpeed's, which it compiles


def _trial(*, ranks: int = 1, stage: int = 1, **config: Any) -> Trial:
    """A trial that no other has the number of.

    Args:
        ranks: its slots.
        stage: of ZeRO.
        config: sections that are laid over the configuration.
    """
    batch, number = BatchTriple(4 * ranks, 4, 1), next(_numbers)
    zero = {"zero_optimization": {**config.pop("zero_optimization", {}), "stage": stage}}
    overrides = {**batch.config(), **zero, **config}
    return Trial(number, TrialKind.SEARCH, f"t{number}", stage, batch, overrides=overrides)


def _line(outcome: Outcome) -> str:
    if outcome.metrics is None:
        return f"{outcome.kind.value}: {outcome.message}"
    return (
        f"{outcome.metrics.latency:.1f} ms a step +-{outcome.metrics.ci95:.0%}, "
        f"{outcome.duration_s:.1f} s in all"
    )


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout


def _uuids() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    text = _output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    return [line.strip() for line in text.splitlines() if line.startswith("GPU-")]


def _in_environment(variables: Mapping[str, str]) -> Machine:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return find_machine()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _without_nvml(folder: Path) -> dict[str, str]:
    """Variables of a process that finds a management library that cannot be loaded."""
    hidden = folder / "no-nvml"
    hidden.mkdir()
    (hidden / "libnvidia-ml.so.1").touch()
    paths = [str(hidden.resolve()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _dsat(words: Sequence[str], folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "dsat", *words]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=env, check=False, timeout=_PART_S
    )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
