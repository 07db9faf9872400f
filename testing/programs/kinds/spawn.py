"""A script that spawns its ranks."""

import os
import sys

import deepspeed
import torch.multiprocessing as mp
from small import batches, config, net, tell


def work(rank: int, world: int, size: int, port: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    deepspeed.init_distributed(dist_backend="gloo")
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(size)
    )
    for (batch,) in batches(size):
        engine.backward(engine(batch).square().mean())
        engine.step()
    if rank == 0:
        tell(engine.global_steps, size)


if __name__ == "__main__":
    mp.spawn(work, (2, int(sys.argv[1]), sys.argv[2]), 2)  # type: ignore[attr-defined,no-untyped-call]
