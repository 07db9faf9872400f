"""Train a small model for ever, with the DeepSpeed configuration that it is given.

After a few steps of a trial, what torch's allocator knows is in the trial's `memory_stats.json`.
"""

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", type=Path, required=True)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--local_rank", type=int)
parser.add_argument("--out_of_memory", choices=("forward", "backward", "step"))
arguments = parser.parse_args()


class Fills(torch.autograd.Function):
    """The identity; asks for more memory than there is, in its forward or its backward pass."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        if arguments.out_of_memory == "forward":
            ask_for_all()
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if arguments.out_of_memory == "backward":
            ask_for_all()
        return gradient


def ask_for_all(*_: object) -> None:
    kept = []
    while True:
        kept.append(torch.empty(2**28, dtype=torch.uint8, device=engine.device))


layers = [nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
config = json.loads(arguments.deepspeed_config.read_text())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
size, dtype = engine.train_micro_batch_size_per_gpu(), next(engine.module.parameters()).dtype
for step in range(10_000):
    inputs = torch.randn(size, arguments.width, device=engine.device, dtype=dtype)
    outputs = engine(inputs)
    if step == 2 and arguments.out_of_memory == "step":
        register_optimizer_step_pre_hook(ask_for_all)
    elif step == 2 and arguments.out_of_memory:
        outputs = Fills.apply(outputs)
    engine.backward(outputs.float().square().mean())
    engine.step()
    if step == 4 and torch.cuda.is_available() and engine.global_rank == 0:
        stats = json.dumps(torch.cuda.memory_stats(), indent=1) + "\n"
        Path(os.environ.get("DSAT_TRIAL_DIR", "."), "memory_stats.json").write_text(stats)
