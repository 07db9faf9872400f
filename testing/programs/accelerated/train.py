"""A script around accelerate, which has its DeepSpeed configuration from `accelerate launch`."""

import argparse
import itertools

import torch
from accelerate import Accelerator
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
arguments = parser.parse_args()

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(512, 64))
loader = torch.utils.data.DataLoader(data, batch_size=arguments.per_device_train_batch_size)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (inputs,) in itertools.chain.from_iterable(itertools.repeat(loader)):
    with accelerator.accumulate(model):
        loss = (model(inputs) - inputs).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
