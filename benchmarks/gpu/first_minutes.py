"""The first minutes with a GPU: what a CUDA without a device cannot tell.

    python -m benchmarks.gpu.first_minutes FOLDER [--part N] [--steps NAME ...] [--short] [--again]

Each step is independent, prints its findings as rows of a table, and has written each into
`FOLDER/STEP.json` before the next; what trials measured is kept below `FOLDER/STEP`. A part takes
at most 10 minutes: a step that would begin later is left for another call. Steps that have
succeeded are not taken again (--again takes them). The exit status is 1 if a step failed.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.gpu import device_steps, search_steps
from benchmarks.gpu.report import Engines, Report
from dsat.engines.machines.machine import find_machine
from dsat.values.trial import TrialOptions

_PART_S = 600.0
_DONE = "took (s)"  # the last finding of a step that has succeeded
# By part, the most important first.
STEPS: Mapping[str, tuple[int, Callable[[Report], None]]] = {
    "devices": (1, device_steps.devices),
    "forks": (1, device_steps.forks),
    "gpt2_medium": (1, search_steps.gpt2_medium),
    "llama_1b": (2, search_steps.llama_1b),
    "starts": (2, device_steps.starts),
    "cost_of_measuring": (2, search_steps.cost_of_measuring),
    "published": (3, search_steps.published),
    "offload_search": (4, search_steps.offload_search),
    "compile_search": (4, search_steps.compile_search),
    "out_of_memory": (5, device_steps.out_of_memory),
    "memory_back": (5, device_steps.memory_back),
    "native_autotuner": (5, search_steps.native_autotuner),
    "operators": (6, device_steps.operators),
    "offload": (6, device_steps.offload),
    "precisions": (6, device_steps.precisions),
    "side_by_side": (6, device_steps.side_by_side),
}
PARTS = sorted({part for part, _ in STEPS.values()})


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", type=int, choices=PARTS)
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), metavar="NAME")
    parser.add_argument("--short", action="store_true", help="only see that each step runs")
    parser.add_argument("--again", action="store_true", help="also steps that have succeeded")
    arguments = parser.parse_args(argv)
    parts = (arguments.part,) if arguments.part else PARTS
    names = arguments.steps or [name for name, (part, _) in STEPS.items() if part in parts]
    machine = find_machine()
    briefly: dict[str, Any] = {"warm_up_s": 0.1, "measured_s": 0.1} if arguments.short else {}
    options = TrialOptions(timeout_s=240.0, max_steps=6, **briefly)
    engines = Engines(machine, arguments.folder / "engines", options)
    began_s, failed = time.monotonic(), []
    for name in names:
        folder, step = arguments.folder / name, STEPS[name][1]
        if not arguments.again and _has_succeeded(folder):
            print(f"{name}: done before")
            continue
        if time.monotonic() - began_s > _PART_S:
            print(f"{name}: left for another call, {_PART_S / 60:g} minutes are over")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        report = Report(folder, machine, arguments.short, engines)
        print(f"\n{name}: {step.__doc__}\n\n| | |\n|---|---|", flush=True)
        step_began_s = time.monotonic()
        try:
            step(report)
            report.note(_DONE, round(time.monotonic() - step_began_s, 1))
        except Exception as error:
            failed.append(name)
            report.note("failed", f"{type(error).__name__}: {error}")
            (folder / "traceback.txt").write_text(traceback.format_exc())
            engines.close()  # what a device does after a failure is no matter of the next step
    engines.close()
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _has_succeeded(folder: Path) -> bool:
    path = folder.with_suffix(".json")
    return path.exists() and _DONE in json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
