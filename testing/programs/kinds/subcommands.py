"""Subcommands and arguments, parsed by argparse."""

import argparse

import deepspeed
from small import batches, config, net, tell

p = argparse.ArgumentParser()
commands = p.add_subparsers(dest="command", required=True)
train = commands.add_parser("train")
train.add_argument("--bs", type=int, default=4)
train.add_argument("--accum", type=int, default=1)
commands.add_parser("test")
a = p.parse_args()
model = net()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config(a.bs, a.accum)
)
for _ in range(2):
    for (batch,) in batches(a.bs):
        engine.backward(engine(batch).square().mean())
        engine.step()
tell(engine.global_steps, a.bs)
