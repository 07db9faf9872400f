"""One real rank on a CPU: what torch's allocator held, by phase, on standard output.

Counted by `heap.c`, which must be preloaded. torch.profiler is no help: it does not see what other
threads free, gloo's among them, and its totals drift upwards. A rank that is alone gets a process
group that does nothing, because gloo makes copies of what it reduces and gathers, as NCCL does not.
"""

import argparse
import ctypes
import gc
import json
import os

os.environ.pop("LD_PRELOAD", None)  # not for the compilers that DeepSpeed may start
parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--config", required=True, type=json.loads)
args = parser.parse_args()

import deepspeed  # noqa: E402
import models  # type: ignore[import-not-found]  # noqa: E402
import torch  # noqa: E402

heap_peak = ctypes.CDLL(None).heap_peak
heap_peak.restype = ctypes.c_size_t
torch.set_num_threads(1)
if os.environ["WORLD_SIZE"] == "1":
    from dsat.in_trial.simulation.patches import make_process_group

    make_process_group(1, "cpu")
peaks: dict[str, int] = {}
phase = "script"


def begin(name: str) -> None:
    global phase
    peaks[phase] = max(peaks.get(phase, 0), heap_peak())
    phase = name


task = models.TASKS[args.model]
heap_peak()
model = task.model()
trained = [p for p in model.parameters() if p.requires_grad]
begin("init")
engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=args.config)
gc.collect()
dtype = next(engine.module.parameters()).dtype
begin("batch")
inputs, targets = task.batch(engine.train_micro_batch_size_per_gpu(), dtype)
for warm in (False, True):
    for _ in range(engine.gradient_accumulation_steps()):
        begin("forward" if warm else "warm-up")
        loss = task.loss(engine(inputs), targets)
        begin("backward" if warm else "warm-up")
        engine.backward(loss)
        begin("step" if warm else "warm-up")
        engine.step()
        del loss
    gc.collect()
begin("end")
print("PEAKS " + json.dumps(peaks), flush=True)
os._exit(0)
