"""Simulated against real memory, on this machine's CPU: prints a table.

    python3 benchmarks/memory_accuracy.py [gpt2_small resnet50 gpt ...]

A real run is measured by what torch's allocator held (see testing/programs/memory/heap.c).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dsat.memory import PHASES
from dsat.memory.simulation_client import Question, Simulator
from testing.allocator import configuration, counting_library, real_peaks
from testing.local import engine_of

_MIB = 2**20
_GRID: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "dtype": "fp32"},
    {"stage": 1},
    {"stage": 1, "accumulate": "fp32"},
    {"stage": 2},
    {"stage": 2, "dtype": "fp32"},
    {"stage": 2, "gas": 2},
    {"stage": 2, "accumulate": "fp32", "gas": 2},
    {"stage": 2, "offload": "optimizer"},
    {"stage": 3},
    {"stage": 3, "offload": "optimizer param"},
    {"stage": 0, "slots": 2},
    {"stage": 1, "slots": 2},
    {"stage": 2, "slots": 2},
    {"stage": 3, "slots": 2},
]
# Batch normalisation with bf16 parameters and fp32 buffers does not run on a CPU.
_FP32_ONLY = ("resnet", "resnet50")


def main(models: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = counting_library(folder)
        print("| model | configuration | real MiB | simulated MiB | error | by phase | seconds |")
        print("|---|---|---|---|---|---|---|")
        for model in models:
            entry = f"python3 train.py --model {model} --deepspeed_config ds_config.json"
            (folder / model).mkdir()
            engine = engine_of("memory", folder / model, entry=entry)
            try:
                with Simulator(engine, as_cpu=True, timeout_s=300) as simulator:
                    for case in _cases(model):
                        _compare(simulator, library, model, case)
            finally:
                engine.close()


def _cases(model: str) -> list[dict[str, Any]]:
    if model not in _FP32_ONLY:
        return _GRID
    cases = [{**case, "dtype": "fp32"} for case in _GRID if "accumulate" not in case]
    return [case for i, case in enumerate(cases) if case not in cases[:i]]


def _compare(simulator: Simulator, library: Path, model: str, case: dict[str, Any]) -> None:
    config, slots = configuration(**case), int(case.get("slots", 1))
    try:
        real = real_peaks(library, model, config, slots)
    except RuntimeError as error:
        print(f"| {model} | {_text(case)} | failed: {str(error).splitlines()[-1]} | | | | |")
        return
    began = time.monotonic()
    micro_batch = int(config["train_micro_batch_size_per_gpu"])
    simulated = simulator.estimates([Question(config, micro_batch, slots)])[0]
    seconds = time.monotonic() - began
    assert not isinstance(simulated, str), simulated
    errors = {phase: getattr(simulated, phase) / real[phase] - 1 for phase in PHASES}
    peak = max(real[phase] for phase in PHASES)
    print(
        f"| {model} | {_text(case)} | {peak / _MIB:.1f} | {simulated.peak / _MIB:.1f} "
        f"| {simulated.peak / peak - 1:+.2%} "
        f"| {', '.join(f'{phase} {error:+.2%}' for phase, error in errors.items())} "
        f"| {seconds:.1f} |",
        flush=True,
    )


def _text(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


if __name__ == "__main__":
    main(sys.argv[1:] or ["gpt2_small", "resnet50"])
