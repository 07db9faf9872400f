"""A training loop of accelerate's, which knows DeepSpeed by its plugin only."""

import torch
from accelerate import Accelerator


def main() -> None:
    """Train on random numbers."""
    accelerator = Accelerator()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 16))
    loader = torch.utils.data.DataLoader(data, config["train_micro_batch_size_per_gpu"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
