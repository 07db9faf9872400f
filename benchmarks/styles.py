"""Scripts of every style: simulated memory against that of a real rank on this machine's CPU.

    python3 -m benchmarks.styles [--null] [NAME ...]

Prints a table of docs/predicting.md. If DeepSpeed or a library cannot train a style without a GPU,
the rank runs on a CUDA without a device (testing/null_cuda); with --null, all ranks do. Styles of
peft and lightning need these packages.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dsat.memory.estimate import MemoryEstimate
from dsat.simulation.client import SimulationUnavailable
from testing.catalogue import STYLES, Style
from testing.styles import real_peaks, simulated
from testing.tuned_scripts import is_installed

_MIB = 2**20
_MICRO_BATCH = 4
_STEADY = ("forward", "backward", "step")


def main(words: list[str]) -> None:
    null, names = "--null" in words, [word for word in words if word != "--null"]
    print("| style | stage | simulated MiB | real MiB | error |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, style in enumerate(STYLES):
            if names and not any(part in style.name for part in names):
                continue
            of_style = folder / str(number)
            of_style.mkdir()
            print(_row(style, of_style, null), flush=True)


def _row(style: Style, folder: Path, null: bool) -> str:
    head = f"| {style.name} | {style.stage} |"
    if not is_installed(style.needs):
        return f"{head} | | {style.needs} is not installed |"
    try:
        peak = _peak(simulated(style, folder, _MICRO_BATCH, on_device=null))
    except SimulationUnavailable as error:
        return f"{head} not simulated: {str(error).splitlines()[0]} | | |"
    try:
        real = real_peaks(style, folder, _MICRO_BATCH, on_device=null)
    except RuntimeError as error:  # for example, Triton cannot compile for the null CUDA
        lines = str(error).splitlines()[::-1]
        reason = next((line for line in lines if "Error" in line), lines[0] if lines else "")
        return f"{head} {peak / _MIB:.1f} | not run: {reason} | |"
    needed = max(real[phase] for phase in _STEADY if phase in real)
    return f"{head} {peak / _MIB:.1f} | {needed / _MIB:.1f} | {peak / needed - 1:+.2%} |"


def _peak(estimate: MemoryEstimate) -> int:
    return max(estimate.forward, estimate.backward, estimate.step)


if __name__ == "__main__":
    main(sys.argv[1:])
