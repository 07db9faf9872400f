"""Train a small transformer and time its steps, with a clock that dsat does not touch.

    python3 own_clock.py --steps 200 --deepspeed_config ds_config.json

Writes the seconds of each optimizer step into the file that the variable OWN_CLOCK names.
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

CLASSES, LENGTH, WIDTH = 10, 64, 256


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(WIDTH * LENGTH, CLASSES))


def batches(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches forever, from a data loader with PyTorch's defaults."""
    count = 8 * size
    data = TensorDataset(torch.randn(count, LENGTH, WIDTH), torch.randint(CLASSES, (count,)))
    while True:
        yield from DataLoader(data, size, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, required=True)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    model = transformer()
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data = batches(engine.train_micro_batch_size_per_gpu())
    ends = [time.perf_counter()]
    try:
        while engine.global_steps < args.steps:
            inputs, classes = next(data)
            outputs = engine(inputs.to(engine.device))
            engine.backward(nn.functional.cross_entropy(outputs, classes.to(engine.device)))
            engine.step()
            ends.append(time.perf_counter())
    finally:
        seconds = [end - began for began, end in itertools.pairwise(ends)]
        Path(os.environ["OWN_CLOCK"]).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
