"""Set the boundary of gradient accumulation by hand, and step only there."""

import argparse

import deepspeed
from small import batches, config, net, tell

p = argparse.ArgumentParser()
p.add_argument("--micro-batch-size", type=int, default=2)
p.add_argument("--accumulate", type=int, default=4)
a = p.parse_args()
model = net()
own = config(a.micro_batch_size, a.accumulate)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=own)
for _ in range(2):
    for number, (batch,) in enumerate(batches(a.micro_batch_size), start=1):
        is_last = number % a.accumulate == 0
        engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        engine.backward(engine(batch).square().mean())
        if is_last:
            engine.step()
tell(engine.global_steps, a.micro_batch_size)
