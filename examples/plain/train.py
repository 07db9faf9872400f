"""Trains a small language model with DeepSpeed: a script with nothing of dsat in it.

    deepspeed train.py --deepspeed --deepspeed_config ds_config.json

The data are random tokens, made on the spot: what counts here is speed.
"""

import argparse

import deepspeed
import torch
from torch import nn

VOCABULARY = 8192


class LanguageModel(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it; tokens: (batch, length)."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=hidden.device, dtype=hidden.dtype
        )
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1)
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    model = LanguageModel(args.width, args.layers, args.length)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    batch_size = engine.train_micro_batch_size_per_gpu()
    while engine.global_steps < args.steps:
        tokens = torch.randint(VOCABULARY, (batch_size, args.length), device=engine.device)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
