"""A plain DeepSpeed script with a slow data set and a flag for the loader's workers."""

import argparse
import time

import deepspeed
import torch


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.003)
        return torch.full((64,), float(index % 7))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=0)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    engine, _, _, _ = deepspeed.initialize(args, model, model_parameters=model.parameters())
    loader = torch.utils.data.DataLoader(
        Slow(), engine.train_micro_batch_size_per_gpu(), num_workers=args.num_workers
    )
    for batch in loader:
        loss = torch.nn.functional.mse_loss(engine(batch), batch)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
