"""The transformer that DeepSpeedExamples' training/bf16_master_weight describes.

Its norms follow attention and linear parts; it has learned positions, and a loss outside of the
model.
"""

import argparse
import json

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", required=True)
for name in ("width", "layers", "heads", "vocabulary", "length"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--recompute", action="store_true")
args = parser.parse_args()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(args.width, args.heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.up, self.down = (
            nn.Linear(args.width, 4 * args.width),
            nn.Linear(4 * args.width, args.width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.mix(x, x, x)[0])
        found: torch.Tensor = self.norm2(x + self.down(nn.functional.gelu(self.up(x))))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.length, args.width)
        self.layers = nn.ModuleList(Layer() for _ in range(args.layers))
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if args.recompute else layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


with open(args.deepspeed_config) as file:
    autocasts = "torch_autocast" in json.load(file)
model = Model()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
while True:
    shape = engine.train_micro_batch_size_per_gpu(), args.length
    tokens, labels = (torch.randint(0, args.vocabulary, shape).to(engine.device) for _ in "12")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocasts):
        # As in the original, the logits live until the next step replaces them.
        logits = engine(tokens)
        loss = nn.functional.cross_entropy(logits.view(-1, args.vocabulary), labels.view(-1))
    engine.backward(loss)
    engine.step()
    loss.item()
