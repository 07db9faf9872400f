"""Models whose memory is predicted and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import deepspeed
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        wide = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        added: torch.Tensor = self.down(wide)
        return x + added


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, heads: int, remat: str = ""
    ) -> None:
        """Make a GPT.

        Args:
            remat: how blocks are recomputed: "", "reentrant" or "non-reentrant".
        """
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.remat = remat
        self.offloads = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.offloads:
                x = deepspeed.checkpointing.checkpoint(block, x)
                continue
            reentrant = self.remat == "reentrant"
            x = checkpoint(block, x, use_reentrant=reentrant) if self.remat else block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Recomputed(nn.Module):
    """Blocks that are all recomputed, if the inputs require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(256, 4) for _ in range(4))
        self.head = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        logits: torch.Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Task:
    """A model and its batches; the loss is computed outside of the model."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.dtype], Batch]

    @staticmethod
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def _gpt(
    vocabulary: int, length: int, width: int, layers: int, heads: int, remat: str = ""
) -> Task:
    def batch(size: int, dtype: torch.dtype) -> Batch:
        tokens = torch.zeros(size, length, dtype=torch.long)
        return tokens, tokens.clone()

    return Task(lambda: GPT(vocabulary, length, width, layers, heads, remat), batch)


def _images(model: Callable[[], nn.Module], pixels: int) -> Task:
    def batch(size: int, dtype: torch.dtype) -> Batch:
        return torch.zeros(size, 3, pixels, pixels, dtype=dtype), torch.zeros(
            size, dtype=torch.long
        )

    return Task(model, batch)


def _with_gradients(size: int, dtype: torch.dtype) -> Batch:
    inputs = torch.zeros(size, 64, 256, dtype=dtype).requires_grad_()
    return inputs, torch.zeros(size, 64, dtype=torch.long)


def _offloading() -> nn.Module:
    """Make a GPT whose blocks DeepSpeed checkpoints, and may offload the inputs of, to the host."""
    model = GPT(4096, 64, 256, 12, 4)
    model.offloads = True
    return model


def _lora() -> nn.Module:
    """Make a GPT of which only the last block is trained."""
    model = GPT(4096, 64, 256, 4, 4)
    model.requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    return model


def _resnet(name: str) -> nn.Module:
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)()
    return model


TASKS = {
    "gpt": _gpt(4096, 64, 256, 4, 4),
    "gpt_remat": _gpt(4096, 64, 256, 4, 4, remat="non-reentrant"),
    "gpt_reentrant": _gpt(4096, 64, 256, 4, 4, remat="reentrant"),
    "recomputed": Task(Recomputed, _with_gradients),
    "offloading": Task(_offloading, _gpt(4096, 64, 256, 12, 4).batch),
    "lora": Task(_lora, _gpt(4096, 64, 256, 4, 4).batch),
    "resnet": _images(lambda: _resnet("resnet18"), 64),
    "gpt2_small": _gpt(50257, 128, 768, 12, 12),
    "resnet50": _images(lambda: _resnet("resnet50"), 224),
}
