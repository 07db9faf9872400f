"""What a CUDA without a device cannot tell of devices, trials and failures: steps of the kit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import common
from benchmarks.common import MIB
from benchmarks.gpu.report import Report, line, new_trial
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machine
from dsat.engines.supervisors import Supervisors
from dsat.values.outcome import Outcome, OutcomeKind

# What a process leaves of a device's memory, and a model whose states need more: 67 million
# parameters of 16 bytes.
_LEFT_BYTES, _LARGE = 768 * MIB, ("--width", "4096")
_OWN_ADAM = {"params": {"torch_adam": False}}  # DeepSpeed's, which it compiles


def devices(report: Report) -> None:
    """Slots by default, by id, by UUID and without any; what the machine has (D16)."""
    for tool, option in (("nvidia-smi", "-L"), ("nvcc", "--version")):
        report.note(tool, _lines(report, tool, option)[-1:] or "not there")
    report.note("machine", report.machine.describe())
    for warning in report.machine.warnings:
        report.note("warning", warning)
    uuids = _lines(report, "nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    chosen = [report.machine.devices[-1], *uuids[-1:]]
    for device in chosen[: 1 if report.short else None]:
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=device):
            found = find_machine()
        report.check(f"CUDA_VISIBLE_DEVICES={device}", found.devices == (device,), found.devices)


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


def starts(report: Report) -> None:
    """One configuration warm and cold: the same figures, and how long a trial takes."""
    for cold in (False, True):
        for number in (1,) if report.short else (1, 2, 3):
            report.run(f"{'cold' if cold else 'warm'} {number}", new_trial(), cold=cold)


def out_of_memory(report: Report) -> None:
    """Memory runs out in each pass; the slot is free again and the next trial runs."""
    for phase in ("forward", "backward", "step"):
        failed = new_trial()
        outcome = common.run_trial(report.engines.get("--out_of_memory", phase), failed)
        report.check(f"in the {phase}", outcome.kind is OutcomeKind.OOM, line(outcome))
        report.run(f"after the {phase}", new_trial())


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
        report.run("trial at once", new_trial(), *_LARGE)


def operators(report: Report) -> None:
    """DeepSpeed's own Adam is compiled; a compiler that was killed holds up nobody (D13)."""
    if report.lacks_nvcc():
        return
    os.environ["TORCH_EXTENSIONS_DIR"] = str((report.folder / "extensions").resolve())
    engine, killed = report.engines.get(), new_trial(optimizer=_OWN_ADAM)
    engine.launch(killed)
    engine.poll(20.0)
    engine.cancel(killed.id)
    while not engine.poll(10.0):
        pass
    report.run("after a kill", new_trial(optimizer=_OWN_ADAM))


def offload(report: Report) -> None:
    """What an offloaded optimizer takes of the host, and what threads are worth (D5, D7)."""
    if report.lacks_nvcc():
        return
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    for name, threads in (("1", {"OMP_NUM_THREADS": "1"}), ("all", {})):
        trial = new_trial(stage=2, zero_optimization=offloaded, optimizer=_OWN_ADAM)
        with mock.patch.dict(os.environ):
            os.environ.pop("OMP_NUM_THREADS", None)
            os.environ.update(threads)
            report.run(f"{name} threads", trial)


def precisions(report: Report) -> None:
    """fp16, whose first steps are skipped, and bf16."""
    for name in ("bf16",) if report.short else ("bf16", "fp16"):
        precision: dict[str, Any] = {name: {"enabled": True}}
        report.run(name, new_trial(**precision))


def side_by_side(report: Report) -> None:
    """With two GPUs: a trial alone against beside another, and one of two ranks (D6, D14)."""
    if report.machine.num_slots < 2:
        report.note("left out", "one GPU")
        return
    if not report.short:
        report.run("alone", new_trial())
    engine, both = report.engines.get(), [new_trial(), new_trial()]
    for trial in both:
        engine.launch(trial)
    ended: dict[int, Outcome] = {}
    while len(ended) < len(both):
        ended.update(engine.poll(30.0))
    for number, trial in enumerate(both, start=1):
        report.keep(f"beside {number}", trial, ended[trial.id])
    report.run("two ranks", new_trial(ranks=2), slots=2)


def _lines(report: Report, tool: str, *options: str) -> list[str]:
    """Return what a tool of CUDA says; nothing if it is not there."""
    if shutil.which(tool) is None:
        return []
    return report.command([tool, *options], report.folder)[1].strip().splitlines()


def _without_nvml(folder: Path) -> dict[str, str]:
    """Variables of a process that finds a management library that cannot be loaded."""
    hidden = folder / "no-nvml"
    hidden.mkdir()
    (hidden / "libnvidia-ml.so.1").touch()
    paths = [str(hidden.resolve()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths)}
