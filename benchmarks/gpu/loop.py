"""Trains a small model for ever, with the DeepSpeed configuration that it is given."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", type=Path, required=True)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()
layers = [nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
config = json.loads(arguments.deepspeed_config.read_text())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
size, dtype = engine.train_micro_batch_size_per_gpu(), next(engine.module.parameters()).dtype
for _ in range(10_000):
    inputs = torch.randn(size, arguments.width, device=engine.device, dtype=dtype)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
