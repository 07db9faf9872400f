"""Scripts of every style: simulated memory against a real rank on this machine's CPU.

    python3 -m benchmarks.styles [NAME ...]

Prints the table of docs/estimate.md. Where DeepSpeed or a library trains nothing without a GPU, the
style is simulated only. peft and lightning have to be installed for theirs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dsat.memory import MemoryEstimate
from dsat.memory.simulation_client import SimulationUnavailable
from testing.allocator import counting_library
from testing.styles import STYLES, Style, real_peaks, simulated

_MIB = 2**20
_MICRO_BATCH = 4
_STEADY = ("forward", "backward", "step")


def main(names: list[str]) -> None:
    print("| style | stage | simulated MiB | real MiB | error |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = counting_library(folder)
        for number, style in enumerate(STYLES):
            if names and not any(part in style.name for part in names):
                continue
            of_style = folder / str(number)
            of_style.mkdir()
            print(_row(style, library, of_style), flush=True)


def _row(style: Style, library: Path, folder: Path) -> str:
    head = f"| {style.name} | {style.stage} |"
    if not style.is_possible:
        return f"{head} | | {style.needs} is not installed |"
    try:
        peak = _peak(simulated(style, folder, _MICRO_BATCH))
    except SimulationUnavailable as error:
        return f"{head} not simulated: {str(error).splitlines()[0]} | | |"
    if not style.on_cpu:
        return f"{head} {peak / _MIB:.1f} | needs a GPU | |"
    real = real_peaks(style, library, folder, _MICRO_BATCH)
    needed = max(real[phase] for phase in _STEADY if phase in real)
    return f"{head} {peak / _MIB:.1f} | {needed / _MIB:.1f} | {peak / needed - 1:+.2%} |"


def _peak(estimate: MemoryEstimate) -> int:
    return max(estimate.forward, estimate.backward, estimate.step)


if __name__ == "__main__":
    main(sys.argv[1:])
