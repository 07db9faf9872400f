"""Six optimizer steps of a tiny model, in plain DeepSpeed."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
}
WIDTH = 64

model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
for _ in range(6):
    inputs = torch.randn(4, WIDTH, device=engine.device)
    loss = nn.functional.mse_loss(engine(inputs), inputs)
    engine.backward(loss)
    engine.step()
