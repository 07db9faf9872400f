"""A loop with few data, few steps, accumulation by hand, or the folds of a cross-validation."""

import argparse
import os

import deepspeed
from small import batches, net, tell

p = deepspeed.add_config_arguments(argparse.ArgumentParser())
p.add_argument("--epochs", type=int, default=2)
p.add_argument("--rows", type=int, default=480)
p.add_argument("--folds", type=int, default=1)
p.add_argument("--by-hand", type=int, default=1, help="micro batches that the loop accumulates")
p.add_argument("--out", default="", help="a folder that must be new")
a = p.parse_args()
if a.out:
    os.makedirs(a.out, exist_ok=False)
steps = 0
for _ in range(a.folds):
    model = net()
    engine, *_ = deepspeed.initialize(args=a, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu()
    for _ in range(a.epochs):
        for number, (batch,) in enumerate(batches(size, a.rows), start=1):
            engine.backward(engine(batch).square().mean() / a.by_hand)
            if number % a.by_hand == 0:
                engine.step()
    steps += engine.global_steps
tell(steps, size)
