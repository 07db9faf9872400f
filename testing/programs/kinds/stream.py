"""An iterable data set without a length, loaded by two workers."""

import argparse
from collections.abc import Iterator

import deepspeed
import torch
from small import WIDTH, net, tell
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(WIDTH)


p = deepspeed.add_config_arguments(argparse.ArgumentParser())
p.add_argument("--max-steps", type=int, default=100)
a = p.parse_args()
model = net()
engine, *_ = deepspeed.initialize(args=a, model=model, model_parameters=model.parameters())
size = engine.train_micro_batch_size_per_gpu()
for batch in DataLoader(Stream(), size, num_workers=2):
    engine.backward(engine(batch).square().mean())
    engine.step()
    if engine.global_steps == a.max_steps:
        break
tell(engine.global_steps, size)
