"""A small model, its data and configuration, and the line that each script prints at its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 32


def net(out: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, out))


def batches(size: int, rows: int = 480) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(rows, WIDTH)), size, shuffle=True)


def config(micro_batch: int = 4, gas: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }


def tell(steps: int, fed: int) -> None:
    print(f"trained {steps} steps of micro batch {fed}", flush=True)
