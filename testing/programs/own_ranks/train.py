"""A script that starts its two ranks, and takes its batch from its own configuration file.

As in torch's tutorials, the ranks meet at a fixed port, unless the environment sets MASTER_PORT. If
the configuration has a `behaviour`, the ranks are forked, and `fails` makes rank 1 fail.
"""

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
import torch.multiprocessing as mp
from torch import nn

RANKS = 2


def main(rank: int, path: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    config = json.loads(Path(path).read_text())
    behaviour = config.pop("behaviour", "runs")
    model = nn.Linear(16, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for step in range(1_000_000):
        if behaviour == "fails" and rank == 1 and step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        loss = engine(torch.randn(config["train_micro_batch_size_per_gpu"], 16)).square().mean()
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    path = parser.parse_args().deepspeed_config
    fails = "behaviour" in json.loads(Path(path).read_text())
    options = {"nprocs": RANKS, "start_method": "fork" if fails else "spawn"}
    mp.start_processes(main, (path,), **options)  # type: ignore[attr-defined, no-untyped-call]
