"""Cost of `dsat estimate` for models that this machine could not hold: prints a table.

    python3 -m benchmarks.large_models

Each estimate starts with an empty cache, from a transformers configuration alone, for 1, 8 and 64
slots. Memory is that of all processes together, with shared pages counted once. CPU time is less
noisy than wall time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from benchmarks import common

_MODELS = Path(__file__).parent / "models"
_SAMPLED_EVERY_S = 0.5
_LORA = ("--lora", "r=16,target=q_proj+v_proj")
CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Llama 7 B": ("llama-2-7b", ()),
    "Llama 7 B, LoRA": ("llama-2-7b", _LORA),
    "Llama 70 B": ("llama-3.1-70b", ()),
}
_OPTIONS = "--seq-length 2048 --slot-memory 80GiB --devices 1 8 64 --json".split()


def main() -> None:
    common.parser(__doc__).parse_args()
    numbers = ("seconds", "processor seconds", "peak memory GiB")
    common.print_head("model", *numbers, numbers=numbers)
    for name, (model, more) in CASES.items():
        common.print_row(name, *_measured(_MODELS / f"{model}.json", more))


def _measured(path: Path, more: tuple[str, ...]) -> list[str]:
    """Run an estimate; return its seconds, its CPU seconds and its peak of memory in GiB."""
    words = [sys.executable, "-m", "dsat", "estimate", "--model", str(path), *_OPTIONS, *more]
    before, began, peak = os.times(), time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as cache:
        env = common.environment(XDG_CACHE_HOME=cache)
        with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                peak = max(peak, _size(process.pid))
                time.sleep(_SAMPLED_EVERY_S)
    if process.returncode:
        raise SystemExit(f"dsat estimate ended with status {process.returncode}")
    took_s, after = time.perf_counter() - began, os.times()
    used_s = after.children_user + after.children_system
    used_s -= before.children_user + before.children_system
    return [f"{took_s:.1f}", f"{used_s:.1f}", f"{peak / common.GIB:.2f}"]


def _size(pid: int) -> int:
    """Return the memory in bytes of a process and its descendants; shared pages count once."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


if __name__ == "__main__":
    main()
