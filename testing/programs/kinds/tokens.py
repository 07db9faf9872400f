"""Shuffled batches of at most `--max-tokens` tokens, whose number of samples varies."""

import argparse
import random

import deepspeed
import torch
from small import tell
from torch import nn

p = deepspeed.add_config_arguments(argparse.ArgumentParser())
p.add_argument("--max-tokens", type=int, default=512)
a = p.parse_args()
batches: list[list[int]] = [[]]
for length in sorted(random.randint(8, 24) for _ in range(6000)):
    if (len(batches[-1]) + 1) * length > a.max_tokens:
        batches.append([])
    batches[-1].append(length)
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100))
engine, *_ = deepspeed.initialize(args=a, model=model, model_parameters=model.parameters())
for lengths in random.sample(batches, 160):
    rows = [torch.randint(100, (length,)) for length in lengths]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
tell(engine.global_steps, engine.train_micro_batch_size_per_gpu())
