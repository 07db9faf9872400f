"""A training loop of DeepSpeed's; compiled with --compile."""

import argparse

import deepspeed
import torch
from common import model

p = argparse.ArgumentParser()
p.add_argument("--local_rank", type=int, default=-1)
p = deepspeed.add_config_arguments(p)
p.add_argument("--compile", action="store_true")
a = p.parse_args()
net = model()
engine, *_ = deepspeed.initialize(args=a, model=net, model_parameters=net.parameters())
if a.compile:
    engine.compile()
for _ in range(500):
    tokens = torch.randint(
        0, 250, (engine.train_micro_batch_size_per_gpu(), 32), device=engine.device
    )
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
