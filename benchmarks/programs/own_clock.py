"""Trains a small model and tells its own throughput, by a clock that dsat does not touch.

    torchrun own_clock.py --model mlp --steps 200 --deepspeed_config ds_config.json

The first rank writes the seconds of each optimizer step, by the clock on the wall and by that of
its processor, into the file that the environment names as OWN_CLOCK, if it does.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, CLASSES)
    )


def convolutions() -> nn.Module:
    """As in PyTorch's tutorial on CIFAR-10, and DeepSpeedExamples' `training/cifar`."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(256 * 64, CLASSES))


MODELS = {"mlp": mlp, "convolutions": convolutions, "transformer": transformer}
SHAPES = {"mlp": (128,), "convolutions": (3, 32, 32), "transformer": (64, 256)}


def batches(name: str, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """From a data loader as PyTorch makes it by default, without end."""
    count = 8 * size
    data = TensorDataset(torch.randn(count, *SHAPES[name]), torch.randint(CLASSES, (count,)))
    while True:
        yield from DataLoader(data, size, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, default=100)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    model = MODELS[args.model]()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    gas = engine.gradient_accumulation_steps()
    data = batches(args.model, engine.train_micro_batch_size_per_gpu())
    ends = [(time.perf_counter(), time.process_time())]
    try:
        while engine.global_steps < args.steps:
            for _ in range(gas):
                inputs, classes = next(data)
                outputs = engine(inputs.to(engine.device))
                engine.backward(nn.functional.cross_entropy(outputs, classes.to(engine.device)))
                engine.step()
            ends.append((time.perf_counter(), time.process_time()))
    finally:
        path = os.environ.get("OWN_CLOCK")
        if path and os.environ["RANK"] == "0":
            pairs = itertools.pairwise(ends)
            seconds = [(wall - w, busy - b) for (w, b), (wall, busy) in pairs]
            Path(path).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
