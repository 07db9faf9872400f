"""Train one of the benchmarks' models with DeepSpeed; the script contains nothing of dsat.

    deepspeed train.py --model gpt2-small --deepspeed_config ds_config.json

Weights and data are random, as only the speed matters.
"""

import argparse
import math
from collections.abc import Iterator

import deepspeed
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

LORA_RANK = 8

Batch = tuple[torch.Tensor, ...]


def gpt2(*, width: int, layers: int, heads: int, vocabulary: int = 50257) -> GPT2LMHeadModel:
    """Make a GPT-2 of any size, with random weights and without dropout."""
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


class LowRank(nn.Module):
    """A frozen layer plus a trainable product of two thin matrices (LoRA, arXiv:2106.09685)."""

    def __init__(self, frozen: Conv1D) -> None:
        super().__init__()
        inputs, outputs = frozen.weight.shape
        self.frozen = frozen
        self.down = nn.Linear(inputs, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.frozen(hidden) + self.up(self.down(hidden))
        return result


def with_low_rank(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Freeze a model, and add low-rank matrices to the attention of every layer."""
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn)
        block.attn.c_proj = LowRank(block.attn.c_proj)
    return model


def resnet50() -> nn.Module:
    from torchvision.models import resnet50 as make

    model: nn.Module = make(weights=None)
    return model


MODELS = {
    "gpt-5m": lambda: gpt2(width=256, layers=4, heads=4, vocabulary=8192),
    "gpt2-small": lambda: gpt2(width=768, layers=12, heads=12),
    "gpt-wide": lambda: gpt2(width=1536, layers=3, heads=12, vocabulary=8192),
    "gpt2-small-lora": lambda: with_low_rank(gpt2(width=768, layers=12, heads=12)),
    "resnet50": resnet50,
}


class TokenLoss(nn.Module):
    """A model with the loss of predicting each token from the tokens before it."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, labels=tokens).loss
        return loss


class ImageLoss(nn.Module):
    """A model with the loss of classifying images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(images).float(), classes)


def batches(model: nn.Module, size: int, side: int, like: torch.Tensor) -> Iterator[Batch]:
    """Yield random inputs forever: sequences of `side` tokens, or images of `side` pixels."""
    if isinstance(model, TokenLoss):
        vocabulary = model.model.config.vocab_size
        while True:
            yield (torch.randint(vocabulary, (size, side), device=like.device),)
    while True:
        images = torch.randn(size, 3, side, side, device=like.device, dtype=like.dtype)
        yield images, torch.randint(1000, (size,), device=like.device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--side", type=int, default=128, help="tokens in a sequence, or pixels")
    parser.add_argument("--steps", type=int, default=100)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    model = MODELS[args.model]()
    model = (ImageLoss if args.model == "resnet50" else TokenLoss)(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=trained)
    first = next(engine.module.parameters())
    data = batches(model, engine.train_micro_batch_size_per_gpu(), args.side, first)
    while engine.global_steps < args.steps:
        loss = engine(*next(data))
        engine.backward(loss)
        engine.step()
    assert math.isfinite(float(loss))


if __name__ == "__main__":
    main()
