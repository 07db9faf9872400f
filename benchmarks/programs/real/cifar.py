"""Classify 50,000 small pictures like the first tutorials, where DeepSpeed makes the data loader.

    deepspeed cifar.py --deepspeed

62 k parameters; the pictures are random.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {
    "train_batch_size": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
}


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator).byte()
        self.labels = torch.randint(0, 10, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pixels[index].float() / 127.5 - 1.0, self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        scores: torch.Tensor = self.fc3(x)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=Pictures(50_000),
        config=CONFIG,
    )
    for epoch in range(args.epochs):
        for step, (pictures, labels) in enumerate(loader):
            scores = engine(pictures.to(engine.device))
            loss = F.cross_entropy(scores, labels.to(engine.device))
            engine.backward(loss)
            engine.step()
            if step % 1000 == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
