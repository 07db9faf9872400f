"""CLIP: two towers whose features are gathered from all ranks."""

import argparse

import deepspeed
import torch
from small import WIDTH, config, net, tell
from torch import nn
from torch.distributed.nn.functional import all_gather

p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=8)
a = p.parse_args()


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = net(16), net(16)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.image(image), self.text(text)


model = Clip()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config(a.batch_size)
)
while engine.global_steps < 60:
    u, v = engine(torch.randn(a.batch_size, WIDTH), torch.randn(a.batch_size, WIDTH))
    all_u, all_v = (
        torch.cat(all_gather(each))  # type: ignore[no-untyped-call]
        for each in (u, v)
    )
    engine.backward(nn.functional.cross_entropy(all_u @ all_v.T, torch.arange(len(all_u))))
    engine.step()
if engine.global_rank == 0:
    tell(engine.global_steps, a.batch_size)
