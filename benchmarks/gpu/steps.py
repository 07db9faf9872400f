"""The steps of the first minutes with a GPU, one per process.

    python3 -m benchmarks.gpu.steps NAME OUT END [--short]

END is the end of the budget, by `time.monotonic`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dsat
from benchmarks import common
from benchmarks.gpu import by_hand
from benchmarks.gpu.first_minutes import DONE, OPERATORS_LOG, STEPS
from benchmarks.gpu.step import (
    HERE,
    Step,
    StepFailed,
    engine_of,
    gib,
    line,
    median_and_worst,
    run_trial,
)
from dsat.engines.machines.machine import find_machine
from dsat.memory.strategies import apply_strategy, compared
from dsat.prepare.simulated_model import simulate
from dsat.projecting.options import ProjectSettings
from dsat.projecting.projector import Projector, measured
from dsat.projecting.tracing import trace
from dsat.run.run import Run
from dsat.search import gpus
from dsat.show import past_runs
from dsat.show.memory import used_bytes
from dsat.values.host_limits import available_bytes
from dsat.values.outcome import OutcomeKind

_DSAT = (sys.executable, "-m", "dsat")
_LAUNCHER = ("deepspeed", "--num_gpus", "1")
_BRIEF = "--max-trials 3 --finals 0 --end-profile-step 4 --max-measured-steps 4".split()
_SMI = ("nvidia-smi", "--format=csv,noheader,nounits")
_GPU = "name,driver_version,memory.total,memory.used,compute_cap,clocks.max.sm,power.limit"
_LEAST_S = 8.0  # with less time, no further trial begins
# Published by ArcticTraining: Llama-3.1-8B in ZeRO-3 with optimizer and parameters on the host.
# By GPU: tokens, and GiB that the driver counted.
_PUBLISHED = {"H200": (65_000, 137.36), "80 GB": (32_000, 71.91)}


def machine(step: Step) -> None:
    """Record GPU, driver, versions, and the output of `dsat doctor`."""
    step.note("nvidia-smi", step.tool(*_SMI, f"--query-gpu={_GPU}"))
    step.note("nvcc", step.tool("nvcc", "--version")[-1:])
    step.note("host memory available (GiB)", gib(available_bytes()))
    status, said, _ = step.command([*_DSAT, "doctor"])
    step.note("dsat doctor", said)
    probe = [sys.executable, str(HERE / "probe.py"), *(["--short"] if step.short else [])]
    worked, rates, _ = step.command(probe)
    step.note("gpu", rates.strip())
    step.check("status", status == worked == 0, [status, worked])


def gpt2_medium(step: Step) -> None:
    """Tune GPT-2 medium in bf16, as a user would."""
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    config = {**sizes, "zero_optimization": {"stage": 1}}
    folder, command = step.script("gpt2-medium", config, length=1024)
    (folder / "command.json").write_text(json.dumps(command))
    options = _BRIEF if step.short else ["--max-trials", "8"]
    run_dir, use = step.folder / "run", step.folder / "use.csv"
    words = [*_DSAT, "tune", *options, "--run-dir", str(run_dir), *_LAUNCHER, *command]
    began_s = time.time()
    with open(use, "w") as file:
        sampled = "--query-gpu=timestamp,utilization.gpu,memory.used"
        sampler = [*_SMI, sampled, "-lms", "500"] if shutil.which(_SMI[0]) else ["sleep", "inf"]
        with subprocess.Popen(sampler, stdout=file) as process:
            status, said, took_s = step.command(words, folder)
            process.kill()
    step.note("dsat tune", f"status {status}, {took_s:.0f} s\n{said[-2500:]}")
    run = past_runs.load(run_dir).run
    ended_s = [round(at - began_s, 1) for at in run.ended_at_s.values() if at is not None]
    step.note("first answer, last trial (s)", [min(ended_s), max(ended_s)])
    step.note("gain", dsat.load_run(run_dir).gain)
    _note_trials(step, run)
    _note_use(step, run, use)
    step.check("status", status == 0, status)


def llama_1b(step: Step) -> None:
    """Compare memory of Llama-3.2-1B in every strategy.

    The targets are errors of 1 % in the median and 3 % at worst.
    """
    _compare_memory(step, "llama-3.2-1b")


def llama_8b_lora(step: Step) -> None:
    """Compare memory of Llama-3.1-8B with LoRA in every strategy (same targets)."""
    _compare_memory(step, "llama-3.1-8b", "--lora", "--checkpointing")


def failures(step: Step) -> None:
    """Run out of memory in each pass, and kill a rank; later trials must be unharmed."""
    wrong = []
    folder, command = step.script("gpt2", {"zero_optimization": {"stage": 1}}, length=128)
    with engine_of(command, folder) as engine:

        def run(name: str, kind: OutcomeKind | None = OutcomeKind.OK, **keys: Any) -> None:
            outcome = run_trial(engine, 1, **keys)
            step.note(name, line(outcome))
            if kind is not None and outcome.kind is not kind:
                wrong.append(name)

        run("before")
        for phase in ("forward", "backward", "step"):
            run(f"out of memory in the {phase}", OutcomeKind.OOM, fails=phase)
        run("after these")
        run("killed with the memory taken", None, fails="killed")
        step.note("memory in use at once (MiB)", step.tool(*_SMI, "--query-gpu=memory.used"))
        run("at once")  # GPT-2 small needs more than the killed rank had left free
    step.check("outcomes that are wrong", not wrong, wrong)


def projection(step: Step) -> None:
    """Compare projected with measured steps of the trials of GPT-2 medium (target: 10 %)."""
    before = step.folder.with_name("gpt2_medium")
    past = past_runs.load(before / "run")
    os.chdir(before / "work")
    command = ("python3", *json.loads(Path("command.json").read_text()))
    assert past.run.profile is not None
    gpu = gpus.find(past.run.profile.device_name)
    with simulate(ProjectSettings(command=command, to=(1, gpu.name))) as model:
        traced = trace(model, 1, lambda found: [each for each, *_ in measured(past, found)])
    projector, errors = Projector(traced, gpu, None), []
    for strategy, trial, metrics in measured(past, traced):
        if strategy in traced.traces:
            batch = trial.batch
            time_s = projector.step_time(strategy, 1, batch.micro_batch, batch.gas).seconds
            errors.append(1000 * time_s / metrics.latency - 1)
            told = f"{1000 * time_s:.1f} ms, measured {metrics.latency:.1f}: {errors[-1]:+.1%}"
            step.note(f"{trial.id} {trial.name}", told)
    step.note(f"off from {gpu.name}, median and worst", median_and_worst(errors))


def cost_of_measuring(step: Step) -> None:
    """Compare a script's speed by hand with its speed in trials, which have the meter.

    The target is a difference of at most 1 %.
    """
    steps = 60 if step.short else 400
    folder = step.folder / "work"
    folder.mkdir()
    found = by_hand.compare(folder, steps)
    step.note("ms a step", found.step_ms)
    step.note("throughput by hand / in a trial", round(found.hand / found.trial, 4))
    step.note("samples/s in a trial and by hand", [found.trial, found.hand])


def published(step: Step) -> None:
    """Compare the peak of Llama-3.1-8B, offloaded to the host, with a published one (target: 5 %).

    The optimizer is SGD, as most hosts have too little memory for Adam's moments.
    """
    host = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
    }
    is_large = find_machine().memory_bytes > 100 * common.GIB
    tokens, driver_gib = _PUBLISHED["H200" if is_large else "80 GB"]
    step.note("published", f"{tokens:,} tokens, {driver_gib} GiB by the driver")
    model = "gpt2-medium" if step.short else "llama-3.1-8b"
    folder, command = step.script(model, config, "--checkpointing", length=tokens)
    estimate = _start_estimate(folder, command)
    status, said, took_s = step.command([*_LAUNCHER, *command, "--report", "2"], folder)
    step.note("trained", f"status {status}, {took_s:.0f} s")
    found = [json.loads(row) for row in said.splitlines() if row.startswith('{"allocated"')]
    for number, memory in enumerate(found, start=1):
        step.note(f"step {number} (GiB)", {kind: gib(size) for kind, size in memory.items()})
    step.check("peak", bool(found), "measured" if found else said[-1000:])
    off = found[-1]["driver"] / common.GIB / driver_gib - 1
    step.note("driver, off from what was published", f"{off:+.1%}")
    predicted = _estimated(step, estimate).get("z3_offload_param")
    if predicted is not None:
        off = predicted / found[-1]["allocated"] - 1
        step.note("predicted, off from what was allocated", f"{gib(predicted)} GiB: {off:+.2%}")


def operators(step: Step) -> None:
    """Train with DeepSpeed's own Adam on the GPU and on the host, once it is compiled."""
    if shutil.which("nvcc") is None:
        step.note("left out", "no nvcc")
        return
    log = step.folder.with_name(OPERATORS_LOG)
    while not any(word in log.read_text() for word in ("cpu_adam", "Error")):
        time.sleep(0.5)
    step.note("compiled", log.read_text()[-300:])
    config = {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    folder, command = step.script("gpt2", config, length=128)
    with engine_of(command, folder) as engine:
        for device in ("none", "cpu"):
            zero = {"stage": 2, "offload_optimizer": {"device": device}}
            outcome = run_trial(engine, 2, zero_optimization=zero)
            step.check(f"optimizer's state on {device}", outcome.ok, line(outcome))


def tuners(step: Step) -> None:
    """Run `dsat tune` and `deepspeed --autotuning tune` on one script of GPT-2 small."""
    section = {"enabled": True, "fast": True, "max_train_micro_batch_size_per_gpu": 64}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    ours = [*_DSAT, "tune", "--max-trials", "8", "--train-batch-size", "any", *_LAUNCHER]
    theirs = [_LAUNCHER[0], "--autotuning", "tune", *_LAUNCHER[1:], "--num_nodes", "1"]
    for name, words, share in (("dsat", ours, 0.4), ("deepspeed", theirs, 1.0)):
        whole = {**config, "autotuning": section}
        folder, command = step.script("gpt2", whole, length=1024, name=name)
        limit_s = share * step.left_s
        status, said, took_s = step.command([*words, *command], folder, limit_s=limit_s)
        step.note(f"{name}: wall time", f"{took_s:.0f} s, status {status}")
        answers = [*folder.glob("dsat_runs/*/best_ds_config.json")]
        answers += folder.glob("autotuning_results/ds_config_optimal.json")
        found = [each.read_text() for each in answers] or said[-500:]
        step.check(f"{name}: answer", bool(answers), found)


def _compare_memory(step: Step, model: str, *words: str) -> None:
    """Record predicted, allocated and reserved memory of every strategy, for one sample."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    folder, command = step.script(model, config, *words, length=2048)
    estimate, errors = _start_estimate(folder, command), list[float]()
    whole = json.loads((folder / "ds_config.json").read_text())
    predicted: dict[str, int] = {}
    with engine_of(command, folder) as engine:
        # Strategies that offload take longer, so they come last.
        for offloads in (False, True):
            allocated = {}
            for strategy in [each for each in compared(whole) if each.offloads == offloads]:
                if step.left_s < _LEAST_S:
                    step.note(strategy.name, "left out: no time")
                    continue
                outcome = run_trial(engine, strategy.stage, **apply_strategy(whole, strategy, 1))
                if outcome.memory is None or not outcome.memory.allocated_bytes:
                    step.note(strategy.name, line(outcome))
                    continue
                size = allocated[strategy.name] = outcome.memory.peak
                reserved = max(outcome.memory.reserved_bytes.values())
                told = f"allocated {gib(size)}, reserved {gib(reserved)} GiB; {line(outcome)}"
                step.note(strategy.name, told)
            predicted = predicted or _estimated(step, estimate)
            for name, size in allocated.items():
                if name in predicted:
                    errors.append(predicted[name] / size - 1)
                    told = f"{gib(predicted[name])} GiB: {errors[-1]:+.2%}"
                    step.note(f"{name}, predicted", told)
            step.note("off, median and worst", median_and_worst(errors))
    step.check("compared", bool(errors), len(errors))


def _start_estimate(folder: Path, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start an estimate; it needs no device, so trials can run meanwhile."""
    words = [*_DSAT, "estimate", "--json", "--exact", "--devices", "1", "python3", *command]
    with open(folder / "estimate.log", "w") as log:
        env, pipe = common.environment(), subprocess.PIPE
        return subprocess.Popen(words, cwd=folder, env=env, stdout=pipe, stderr=log, text=True)


def _estimated(step: Step, estimate: subprocess.Popen[str]) -> dict[str, int]:
    """Wait for an estimate; return its simulated peaks in bytes, by strategy."""
    try:
        said, _ = estimate.communicate(timeout=step.left_s)
    except subprocess.TimeoutExpired:
        step.note("dsat estimate", "not done in time")
        return {}
    lines = json.loads(said)["lines"] if estimate.returncode == 0 else []
    unsure = {each["strategy"]: each["memory"]["note"] for each in lines if each["memory"]["note"]}
    step.note("dsat estimate", f"status {estimate.returncode}, not simulated: {unsure or 'none'}")
    return {e["strategy"]: e["peak_bytes"] for e in lines if e["strategy"] not in unsure}


def _note_trials(step: Step, run: Run) -> None:
    errors = []
    for number, outcome in run.outcomes.items():
        trial, used = run.trials[number], used_bytes(run, outcome)
        found: dict[str, Any] = {trial.kind.value: line(outcome)}
        if outcome.memory is not None and used is not None:
            reserved = max(outcome.memory.reserved_bytes.values())
            sizes = trial.predicted_bytes, used, reserved, outcome.memory.context_bytes
            found["predicted, used, reserved, context (GiB)"] = [gib(size) for size in sizes]
            if trial.predicted_bytes is not None:
                errors.append(trial.predicted_bytes / used - 1)
        step.note(f"{number} {trial.name}", found)
    step.note("predicted, off by (median and worst)", median_and_worst(errors))


def _note_use(step: Step, run: Run, file: Path) -> None:
    """Record the utilization of the GPU in trials and between them, as the driver samples it."""
    spans = [
        (ended - run.outcomes[number].duration_s, ended)
        for number, ended in run.ended_at_s.items()
        if ended is not None
    ]
    percents: dict[bool, list[float]] = {True: [], False: []}
    for row in csv.reader(file.read_text().splitlines()):
        at_s = time.mktime(time.strptime(row[0].partition(".")[0], "%Y/%m/%d %H:%M:%S"))
        percents[any(began <= at_s <= end for began, end in spans)].append(float(row[1]))
    for where, values in zip(("in trials", "between trials"), percents.values(), strict=True):
        if values:
            step.note(f"use {where} (%, s)", [statistics.fmean(values), len(values) / 2])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(STEPS))
    parser.add_argument("out", type=Path)
    parser.add_argument("ends_s", type=float, metavar="END")
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args(argv)
    began_s, folder = time.monotonic(), arguments.out / arguments.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    step = Step(folder, arguments.ends_s, arguments.short)
    step.note("begun", time.strftime("%Y-%m-%d %H:%M:%S"))
    try:
        globals()[arguments.name](step)
    except (Exception, SystemExit) as error:
        step.note("failed", f"{type(error).__name__}: {error}")
        if not isinstance(error, StepFailed):
            (folder / "traceback.txt").write_text(traceback.format_exc())
        return 1
    step.note(DONE, round(time.monotonic() - began_s, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
