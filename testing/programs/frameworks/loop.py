"""A training loop of accelerate's."""

import argparse

import torch
from accelerate import Accelerator
from common import model, rows, tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

p = argparse.ArgumentParser()
p.add_argument("--per_device_train_batch_size", type=int, default=2)
a = p.parse_args()
accelerator = Accelerator()
words = tokenizer()
data = rows().map(lambda row: words(row["text"]), remove_columns=["text"])
loader = DataLoader(
    data,
    a.per_device_train_batch_size,
    shuffle=True,
    collate_fn=DataCollatorForLanguageModeling(words, mlm=False),
)
net = model()
opt = torch.optim.AdamW(net.parameters(), 1e-3)
net, opt, loader = accelerator.prepare(net, opt, loader)
for _ in range(3):
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
