"""Simulated against real memory, on this machine's CPU: prints a table.

    python3 -m benchmarks.memory_accuracy [gpt2_small resnet50 gpt ...]

Real memory is what torch's allocator holds in a run (see testing/programs/memory/heap.c).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import MIB
from dsat.memory.estimate import PHASES
from dsat.simulation.client import Simulator
from dsat.simulation.protocol import Question
from testing.allocator import configuration, counting_library, real_peaks
from testing.local import engine_of

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


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("models", nargs="*", default=["gpt2_small", "resnet50"], metavar="MODEL")
    models = parser.parse_args().models
    common.print_head(
        *("model", "configuration", "real MiB", "simulated MiB", "error", "by phase", "seconds")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = counting_library(folder)
        for model in models:
            entry = f"python3 train.py --model {model} --deepspeed_config ds_config.json"
            (folder / model).mkdir()
            with (
                contextlib.closing(engine_of("memory", folder / model, entry=entry)) as engine,
                Simulator(engine, as_cpu=True, timeout_s=300) as simulator,
            ):
                for case in _cases(model):
                    common.print_row(
                        model, _text(case), *_compared(simulator, library, model, case)
                    )


def _cases(model: str) -> list[dict[str, Any]]:
    if model not in _FP32_ONLY:
        return _GRID
    cases = [{**case, "dtype": "fp32"} for case in _GRID if "accumulate" not in case]
    return [case for i, case in enumerate(cases) if case not in cases[:i]]


def _compared(simulator: Simulator, library: Path, model: str, case: dict[str, Any]) -> list[str]:
    """Return the cells of real and simulated memory, the errors, and the simulation's seconds."""
    config, slots = configuration(**case), int(case.get("slots", 1))
    try:
        real = real_peaks(library, model, config, slots)
    except RuntimeError as error:
        return [f"failed: {str(error).splitlines()[-1]}", "", "", "", ""]
    began = time.monotonic()
    micro_batch = int(config["train_micro_batch_size_per_gpu"])
    simulated = simulator.estimates([Question(config, micro_batch, slots)])[0]
    seconds = time.monotonic() - began
    assert not isinstance(simulated, str), simulated
    errors = {phase: getattr(simulated, phase) / real[phase] - 1 for phase in PHASES}
    peak = max(real[phase] for phase in PHASES)
    return [
        f"{peak / MIB:.1f}",
        f"{simulated.peak / MIB:.1f}",
        f"{simulated.peak / peak - 1:+.2%}",
        ", ".join(f"{phase} {error:+.2%}" for phase, error in errors.items()),
        f"{seconds:.1f}",
    ]


def _text(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


if __name__ == "__main__":
    main()
