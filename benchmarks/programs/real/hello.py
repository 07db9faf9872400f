"""Train a masked language model in a hand-written loop, with an experiment folder and checkpoints.

    bash hello.sh

Random tokens come from a data loader with a collate function; the transformer has two layers.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import pathlib

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, WIDTH, MASK, SAMPLES = 1000, 64, 64, 1, 5000


class Sentences(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, src_tokens: torch.Tensor, tgt_tokens: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(src_tokens.shape[1], device=src_tokens.device))
        scores = self.head(self.layers(self.tokens(src_tokens) + places))
        return F.cross_entropy(scores.flatten(0, 1).float(), tgt_tokens.flatten(), ignore_index=0)


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(rows)
    masked = torch.rand(tokens.shape) < 0.15
    return {
        "src_tokens": tokens.masked_fill(masked, MASK),
        "tgt_tokens": tokens.masked_fill(~masked, 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_dir", type=pathlib.Path, required=True)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_iterations", type=int, default=10_000)
    parser.add_argument("--checkpoint_every", type=int, default=1000)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    name = datetime.datetime.now(datetime.timezone.utc).strftime("bert.%Y.%m.%d.%H.%M.%S")
    folder = args.checkpoint_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hparams.json").write_text(json.dumps(vars(args), default=str))
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    model = Encoder(2)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    size = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(Sentences(), size, shuffle=True, collate_fn=collate)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, batch in enumerate(itertools.islice(batches, args.num_iterations), start=1):
        loss = engine(**{key: value.to(engine.device) for key, value in batch.items()})
        engine.backward(loss)
        engine.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        if step % args.checkpoint_every == 0:
            engine.save_checkpoint(save_dir=str(folder), client_state={"checkpoint_step": step})


if __name__ == "__main__":
    main()
