"""Six optimizer steps of a tiny model, in plain DeepSpeed."""

import json
from pathlib import Path

import deepspeed
import torch
from torch import nn

CONFIG = json.loads(Path(__file__).with_suffix(".json").read_text())
WIDTH = 64

model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
for _ in range(6):
    inputs = torch.randn(4, WIDTH, device=engine.device)
    loss = nn.functional.mse_loss(engine(inputs), inputs)
    engine.backward(loss)
    engine.step()
