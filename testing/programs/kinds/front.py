"""A batch size that only the parser in front of the subcommands knows."""

import argparse

import deepspeed
from small import batches, config, net, tell

p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=2)
commands = p.add_subparsers(dest="command", required=True)
commands.add_parser("train").add_argument("--accum", type=int, default=4)
commands.add_parser("test").add_argument("--batch", type=int, default=2)
a = p.parse_args()
model = net()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config(a.batch_size, a.accum)
)
for _ in range(2):
    for (batch,) in batches(a.batch_size):
        engine.backward(engine(batch).square().mean())
        engine.step()
tell(engine.global_steps, a.batch_size)
