"""A script with a single rank, for commands that start it with Python in unusual ways.

Its configuration is in its code. If the variable SCRATCH names a folder, the script first reads
the file `seed` there.
"""

import os
from pathlib import Path

import deepspeed
import torch

if "SCRATCH" in os.environ:
    torch.manual_seed(int((Path(os.environ["SCRATCH"]) / "seed").read_text()))
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(name, value)  # as no launcher sets them
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29518")
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
model = torch.nn.Linear(16, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(1_000):
    loss = engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 16)).square().mean()
    engine.backward(loss)
    engine.step()
print("trained with", engine.train_micro_batch_size_per_gpu())
