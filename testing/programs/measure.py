"""Run any script as a real rank, and print the peaks of torch's allocator by phase.

    python3 measure.py SCRIPT [ARGUMENTS]

The peaks are from the end of the first optimizer step to the end of the second; those of
`deepspeed.initialize` are reported too. On a CPU, `memory/heap.c` counts them and must be
preloaded, as torch.profiler misses what other threads free. A single rank gets a process group that
does nothing: gloo, unlike NCCL, copies what it reduces and gathers.
"""

import ctypes
import gc
import json
import os
import runpy
import sys
from typing import Any

os.environ.pop("LD_PRELOAD", None)  # must not reach the compilers that DeepSpeed may start

import deepspeed
import torch

from dsat.simulation.patches import make_process_group

on_device = torch.cuda.is_available()
if not on_device:
    heap_peak = ctypes.CDLL(None).heap_peak
    heap_peak.restype = ctypes.c_size_t
torch.set_num_threads(1)
if os.environ["WORLD_SIZE"] == "1":
    make_process_group(1, "cuda" if on_device else "cpu")
    torch.distributed.init_process_group = lambda *args, **kwargs: None
_initialize = deepspeed.initialize
peaks: dict[str, int] = {}
phase = "script"


def peak_since_the_last() -> int:
    if not on_device:
        return int(heap_peak())
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def begin(name: str) -> None:
    global phase
    peaks[phase] = max(peaks.get(phase, 0), peak_since_the_last())
    phase = name


def initialize(*args: Any, **kwargs: Any) -> Any:
    begin("init")
    result = _initialize(*args, **kwargs)
    begin("after init")
    engine = result[0]
    forward, backward, step = engine.forward, engine.backward, engine.step
    steps = 0

    def steady(name: str) -> None:
        begin(name if steps else "warm-up")

    def own_forward(*args: Any, **kwargs: Any) -> Any:
        if engine.training:
            steady("forward")
        return forward(*args, **kwargs)

    def own_backward(*args: Any, **kwargs: Any) -> Any:
        steady("backward")
        return backward(*args, **kwargs)

    def own_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        at_boundary = engine.is_gradient_accumulation_boundary()
        if at_boundary:
            steady("step")
        found = step(*args, **kwargs)
        if at_boundary:
            steps += 1
            gc.collect()
            if steps == 2:
                begin("end")
                print("\nPEAKS " + json.dumps(peaks), flush=True)  # after any progress bar
                os._exit(0)
            steady("between")
        return found

    engine.forward, engine.backward, engine.step = own_forward, own_backward, own_step
    return result


deepspeed.initialize = initialize
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
peak_since_the_last()
runpy.run_path(sys.argv[0], run_name="__main__")
