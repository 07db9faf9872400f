"""A plain DeepSpeed script that uses a library which works in fresh processes only."""

from pathlib import Path

import deepspeed
import torch
from torch import nn

if "dsat.engines.local.supervisor" in Path("/proc/self/cmdline").read_text():
    raise RuntimeError("this library cannot be forked")

model = nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(1000):
    loss = engine(torch.ones(1, 8, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
