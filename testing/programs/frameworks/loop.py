"""A training loop with accelerate, for `accelerate launch` or with its own DeepSpeed plugin.

Prints its micro batch, ZeRO stage and `--grad_accum` after the training.
"""

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from common import Rows, model
from torch.utils.data import DataLoader

p = argparse.ArgumentParser()
p.add_argument("--per_device_train_batch_size", type=int, default=2)
p.add_argument("--grad_accum", type=int, default=1)
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--deepspeed_config")
p.add_argument("--width", type=int, default=32)
a = p.parse_args()
plugin = DeepSpeedPlugin(hf_ds_config=a.deepspeed_config) if a.deepspeed_config else None
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=a.grad_accum)
net = model(a.width)
opt = torch.optim.AdamW(net.parameters(), 1e-3)
net, opt, loader = accelerator.prepare(
    net, opt, DataLoader(Rows(), a.per_device_train_batch_size, shuffle=True)
)
for _ in range(a.epochs):
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch).loss)
            opt.step()
            opt.zero_grad()
print("trained", net.train_micro_batch_size_per_gpu(), "at", net.zero_optimization_stage())
print("accumulated", a.grad_accum)
