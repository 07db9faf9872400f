"""Searches, published rows and the native autotuner on a real card: steps of the kit."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dsat
from benchmarks import by_hand, device_memory, native, searching
from benchmarks.common import GIB
from benchmarks.gpu.report import Report, line
from dsat.values.host_memory import available_bytes

_MODELS = Path(__file__).parents[1] / "models"
_PROGRAM = Path(__file__).with_name("language_model.py")
_BRIEF = (
    "--max-trials 2 --finals 0 --start-profile-step 2 --end-profile-step 3 --max-profile-steps 3 "
    "--memory-model formula"
).split()
_PARAMS = {"AdamW": {"torch_adam": True}}
# What the host holds of a parameter without moments: bf16, and fp32 with its gradient.
_HOST_BYTES = 10


def gpt2_medium(report: Report) -> None:
    """GPT-2 medium in bf16: estimate, and a search of ten trials (bars: memory within 1 % in the
    median and 3 % at worst)."""
    _estimated(report, "gpt2-medium", {"stage": 1})
    _searched(report, "gpt2-medium", {"stage": 1})


def llama_1b(report: Report) -> None:
    """Llama-3.2-1B in bf16: the same."""
    _estimated(report, "llama-3.2-1b", {"stage": 1}, "--checkpointing")
    _searched(report, "llama-3.2-1b", {"stage": 1}, "--checkpointing")


def cost_of_measuring(report: Report) -> None:
    """A script's own clock, in trials and started by hand: the step time with the meter and without
    it."""
    case = by_hand.Case("transformer", "python3", 1, "transformer", 8, 60, stage=1)
    if report.has_no_speed():
        return
    folder = report.folder / "work"
    folder.mkdir()
    found = by_hand.compare(case, folder, pairs=3)
    report.note("ms a step", found.step_ms)
    report.note("throughput by hand / in a trial", [round(found.ratio, 4), found.pairs])


def published(report: Report) -> None:
    """Peaks that ArcticTraining has published of Llama-3.1-8B: stage 3, optimizer and parameters on
    the host, one sample, activations recomputed; SGD, since the card holds nothing of moments."""
    host = {"device": "cpu", "pin_memory": False}
    zero = {"stage": 3, "offload_optimizer": host, "offload_param": host}
    rows = [
        ("65,000 tokens, 137.36 published", 65_000, []),
        ("300,000, Liger, 134.96", 300_000, ["--liger"]),
    ]
    model = "gpt2-medium" if report.short else "llama-3.1-8b"
    needs = 0 if report.short else 8_030_261_248 * _HOST_BYTES
    if needs > available_bytes():
        report.note("left out", f"the host has less than {needs / GIB:.0f} GiB")
        return
    for name, length, words in rows[: 1 if report.short else None]:
        more = ["--length", str(64 if report.short else length), "--checkpointing", *words]
        folder, command = _work(report, model, zero, *more, batch=1, optimizer="SGD")
        status, said, _ = report.command([*command, "--report", "2"], folder)
        lines = [each for each in said.splitlines() if each.startswith('{"allocated"')]
        if status or not lines:
            report.note(name, (said.strip().splitlines() or ["without a word"])[-1])
            continue
        gib = {key: round(size / GIB, 2) for key, size in json.loads(lines[-1]).items()}
        report.note(name, f"{gib} GiB")


def offload_search(report: Report) -> None:
    """A search that may offload the optimizer to the host."""
    if report.lacks_nvcc():
        return
    _searched(report, "gpt2-medium", {"stage": 2}, options=["--tune", "offload_optimizer"])


def compile_search(report: Report) -> None:
    """A search with torch.compile as a choice."""
    if report.has_no_speed():
        return
    _searched(report, "gpt2-medium", {"stage": 1}, options=["--tune", "torch_compile"])


def native_autotuner(report: Report) -> None:
    """`dsat tune` against `deepspeed --autotuning tune` on the same script."""
    if report.has_no_speed():
        return
    ours, theirs = native.compare(512, runs=1, rounds=3)
    for tuned in (ours, theirs):
        report.note(tuned.name, ", ".join(tuned.cells()[1:]))
    report.note("wall time, ours / theirs", round(ours.wall_s / theirs.wall_s, 3))


def _work(
    report: Report,
    model: str,
    zero: Mapping[str, Any],
    *words: str,
    batch: int = 4,
    optimizer: str = "AdamW",
) -> tuple[Path, list[str]]:
    """Return a folder with the script, and the script's command line there.

    Args:
        model: a file of `benchmarks/models`.
        zero: section of the configuration.
        words: for the script.
        batch: the micro batch.
        optimizer: its type.
    """
    folder = report.folder / f"work-{len(list(report.folder.glob('work*')))}"
    folder.mkdir()
    for file in (_PROGRAM, _MODELS / f"{model}.json"):
        shutil.copy(file, folder)
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4, **_PARAMS.get(optimizer, {})}},
        "zero_optimization": dict(zero),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    (folder / "ds_config.json").write_text(json.dumps(config, indent=1))
    named = ["--model", f"{model}.json", "--deepspeed_config", "ds_config.json"]
    length = [] if "--length" in words else ["--length", "64" if report.short else "1024"]
    size = ["--small"] if report.short else []
    return folder, ["python3", _PROGRAM.name, *named, *length, *size, *words]


def _estimated(report: Report, model: str, zero: Mapping[str, Any], *more: str) -> None:
    folder, command = _work(report, model, zero, *more)
    options = ["--devices", "1", *(["--formula"] if report.short else [])]
    words = [sys.executable, "-m", "dsat", "estimate", *options, "--", *command]
    status, said, took_s = report.command(words, folder)
    simulated = "simulation died" not in said and "by formula:" not in said
    last = (said.strip().splitlines() or [""])[-1]
    report.check("estimate", status == 0 and simulated, f"{took_s:.1f} s: {last}")


def _searched(
    report: Report,
    model: str,
    zero: Mapping[str, Any],
    *more: str,
    options: Sequence[str] = (),
) -> None:
    """Note a search of ten trials: its gain, its times, and the memory of every trial."""
    folder, command = _work(report, model, zero, *more)
    run_dir = report.folder / "run"
    limits = _BRIEF if report.short else ["--max-trials", "10"]
    named = ["--run-dir", str(run_dir.resolve()), "--devices", "1", *limits, *options]
    began_s = time.time()
    words = [sys.executable, "-m", "dsat", "model", *named, "--", *command]
    status, said, took_s = report.command(words, folder)
    report.check("search", status == 0, f"{took_s:.0f} s" if status == 0 else said[-2000:])
    run = searching.run_in(run_dir)
    first_s = min(ended_s for ended_s in run.ended_at_s.values() if ended_s is not None)
    report.note("first figure of the own configuration (s)", round(first_s - began_s, 1))
    report.note("gain", dsat.load_run(run_dir).gain)
    errors: dict[int, float] = {}
    if run.memory_basis is not None:  # memory was simulated
        errors = {n: each.predicted for n, each in device_memory.of_run(run).items()}
    for trial in run.trials.values():
        outcome, batch = run.outcomes[trial.id], trial.batch
        name = f"{trial.name}, stage {trial.stage}, {batch.micro_batch} x {batch.gas}"
        found = {"outcome": line(outcome), "predicted memory is off by": errors.get(trial.id)}
        if outcome.memory is not None:
            for kind in ("allocated_bytes", "reserved_bytes"):
                found[kind] = max(getattr(outcome.memory, kind).values())
        report.note(name, found)
    if errors:
        sizes = sorted(map(abs, errors.values()))
        told = f"{statistics.median(sizes):.2%}, {sizes[-1]:.2%}"
        report.note("memory, median and worst", told)
    for path in run_dir.glob("trials/*/metrics.json"):
        shutil.copy(path, report.folder / f"{path.parent.name}.metrics.json")
