"""A GAN: one engine, with its optimizer, for each of the two networks."""

import argparse

import deepspeed
import torch
from small import WIDTH, batches, config, net, tell
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batchSize", type=int, default=8)
a = p.parse_args()
generator, critic = net(WIDTH), net()
making, *_ = deepspeed.initialize(
    model=generator, model_parameters=generator.parameters(), config=config(a.batchSize)
)
judging, *_ = deepspeed.initialize(
    model=critic, model_parameters=critic.parameters(), config=config(a.batchSize)
)
for _ in range(2):
    for (real,) in batches(a.batchSize):
        made = making(torch.randn(len(real), WIDTH))
        judging.backward(nn.functional.softplus(judging(made.detach()) - judging(real)).mean())
        judging.step()
        making.backward(nn.functional.softplus(-critic(made)).mean())
        making.step()
tell(making.global_steps, a.batchSize)
