"""Train a small GPT on a file of tokens, read at random places: no data loader, no epochs.

    torchrun --standalone --nproc_per_node 1 gpt.py --batch_size 12

The script makes the file if it is missing. The model has two layers and 64 characters of context.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS = 65, 64, 128, 4, 2
DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "train.bin")


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        scores = self.head(self.norm(self.blocks(hidden, self.mask, is_causal=True)))
        return F.cross_entropy(scores.flatten(0, 1).float(), y.flatten())


def make_data() -> None:
    if not os.path.exists(DATA):
        os.makedirs(os.path.dirname(DATA), exist_ok=True)
        np.random.default_rng(0).integers(0, VOCABULARY, 10**6, dtype=np.uint16).tofile(DATA)


def get_batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    data = np.memmap(DATA, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - BLOCK - 1, (size,)).tolist()
    rows = [torch.from_numpy(data[i : i + BLOCK + 1].astype(np.int64)) for i in starts]
    both = torch.stack(rows).to(device)
    return both[:, :-1], both[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--max_iters", type=int, default=100_000)
    args = parser.parse_args()
    make_data()
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    model = GPT()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    size = engine.train_micro_batch_size_per_gpu()
    for step in range(args.max_iters):
        loss = engine(*get_batch(size, engine.device))
        engine.backward(loss)
        engine.step()
        if step % 100 == 0:
            print(f"iter {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
