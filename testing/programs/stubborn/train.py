"""A plain DeepSpeed script that carries on whatever is raised in its training loop."""

import contextlib

import deepspeed
import torch
from torch import nn

model = nn.Linear(8, 8)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
while True:
    with contextlib.suppress(BaseException):
        loss = engine(torch.ones(1, 8, device=engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
