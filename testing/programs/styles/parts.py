"""Parts of the scripts of all styles: arguments, data, a small model."""

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH = 2048, 64, 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--local_rank", type=int)
    return parser.parse_args()


def micro_batch(path: str) -> int:
    """Configuration values of a script that makes its own batches."""
    with open(path) as file:
        return int(json.load(file)["train_micro_batch_size_per_gpu"])


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, samples: int = 512) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (samples, LENGTH))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def batches(size: int) -> Iterator[dict[str, torch.Tensor]]:
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=size)
    return itertools.chain.from_iterable(itertools.repeat(loader))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.mix(normed, normed, normed, need_weights=False)[0]
        added: torch.Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + added


class Language(nn.Module):
    """A transformer with tied weights.

    Args:
        recompute: `torch.utils.checkpoint` around each block: "", "reentrant" or "other".
    """

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.tokens(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())


def llama_settings() -> dict[str, Any]:
    """Configuration of a small Llama, for transformers."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "use_cache": False,
    }
