"""The decoder that lsaie_project on GitHub describes.

It is a Llama with complex rotations, norms in fp32, and a loss outside of the model.
"""

import argparse
import json

import deepspeed
import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config", required=True)
for name in ("width", "layers", "heads", "kv_heads", "inner", "vocabulary", "length"):
    parser.add_argument(f"--{name}", type=int, required=True)
args = parser.parse_args()
SIZE = args.width // args.heads


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(args.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * angles[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def for_all_heads(x: torch.Tensor) -> torch.Tensor:
    batch, length, heads, size = x.shape
    copies = args.heads // heads
    wide = x[:, :, :, None].expand(batch, length, heads, copies, size)
    return wide.reshape(batch, length, args.heads, size)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = [args.width, args.kv_heads * SIZE, args.kv_heads * SIZE, args.width]
        self.query, self.key, self.value, self.out = (
            nn.Linear(args.width, outputs, bias=False) for outputs in linear
        )
        self.gate = nn.Linear(args.width, args.inner, bias=False)
        self.down = nn.Linear(args.inner, args.width, bias=False)
        self.up = nn.Linear(args.width, args.inner, bias=False)
        self.norm1, self.norm2 = Norm(), Norm()

    def attend(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, SIZE) for part in (self.query, self.key, self.value)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = for_all_heads(k), for_all_heads(v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = self.out(found.transpose(1, 2).contiguous().view(x.shape))
        return attended

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x), angles)
        y = self.norm2(x)
        found: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        steps = torch.arange(0, SIZE, 2).float() / SIZE
        turns = torch.outer(torch.arange(args.length).float(), 1 / 500_000**steps)
        self.register_buffer("angles", torch.polar(torch.ones_like(turns), turns), persistent=False)
        self.layers = nn.ModuleList(Layer() for _ in range(args.layers))
        self.norm = Norm()
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


with open(args.deepspeed_config) as file:
    partitioned = json.load(file)["zero_optimization"]["stage"] == 3
torch.set_default_dtype(torch.bfloat16)
with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config, enabled=partitioned):
    model = Model()
torch.set_default_dtype(torch.float32)
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
while True:
    shape = engine.train_micro_batch_size_per_gpu(), args.length
    tokens, labels = (torch.randint(0, args.vocabulary, shape).to(engine.device) for _ in "12")
    logits = engine(tokens)
    exact = logits.flatten(0, 1).float()
    loss = functional.cross_entropy(exact, labels.flatten(0, 1), reduction="sum") / labels.numel()
    del logits, exact
    engine.backward(loss)
    engine.step()
