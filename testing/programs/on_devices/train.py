"""Train on GPUs with torch alone, and write a meter's files: much cheaper than DeepSpeed.

The script reads the micro batch and three further keys of the trial's configuration: `faults`, the
faults of the null CUDA by rank (see `NullCuda.environment`); `steps`; and `pause_s`, the pause
after each step. Each rank writes which device it used, and when.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dsat.values.outcome import MemoryUse, Metrics, ModelProfile, Outcome, OutcomeKind

WIDTH = 1024


def main() -> None:
    began_s = time.time()
    folder = Path(os.environ["DSAT_TRIAL_DIR"])
    config = json.loads((folder / "ds_config.json").read_text())
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["NULL_CUDA_FAULTS"] = config.get("faults", {}).get(str(rank), "")
    torch.cuda.set_device(rank)
    device = torch.cuda.get_device_properties(rank)
    if size > 1:
        dist.init_process_group("nccl")
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    micro_batch, peaks = config["train_micro_batch_size_per_gpu"], {}
    for parameter in model.parameters() if size > 1 else ():
        dist.broadcast(parameter.data, 0)
    torch.empty(micro_batch, pin_memory=True)  # as data loaders do
    for _ in range(config.get("steps", 3)):
        loss = model(torch.randn(micro_batch, WIDTH, device="cuda")).square().mean()
        loss.backward()
        for parameter in model.parameters() if size > 1 else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        time.sleep(config.get("pause_s", 0))
    peaks["step"] = torch.cuda.max_memory_allocated()
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[rank]
    seen = {"device": visible, "name": device.name, "began_s": began_s, "ended_s": time.time()}
    (folder / f"device{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        spec = json.loads((folder / "trial.json").read_text())
        write(folder, config, profile=spec["meter"]["profile"], peaks=peaks, size=size)
    if size > 1:
        dist.barrier()
    os._exit(0)  # as a meter does after the measurement


def write(
    folder: Path, config: dict[str, int], *, profile: bool, peaks: dict[str, int], size: int
) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    memory = MemoryUse(allocated_bytes=peaks, reserved_bytes=peaks)
    # A made-up time: 10 ms for a step, and 1 ms more for each sample.
    micro_batch = config["train_micro_batch_size_per_gpu"]
    gas = config.get("gradient_accumulation_steps", 1)
    step_ms = 10.0 + gas * micro_batch
    speed = 1000.0 * size * gas * micro_batch / step_ms
    count = 8 * WIDTH * WIDTH
    outcome = Outcome(
        OutcomeKind.OK,
        metrics=Metrics(speed, step_ms, step_ms / 3, step_ms / 3, step_ms / 3, 1e9, 5, 0.01),
        memory=memory,
        profile=ModelProfile(count, count, 4, 40 * WIDTH, 6.0 * count, total) if profile else None,
    )
    (folder / "metrics.json").write_text(json.dumps(outcome.to_json()))


if __name__ == "__main__":
    main()
