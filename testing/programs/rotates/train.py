"""A script that changes files and empties a folder: before its engine, in another process and after
each step.

A file is named after its change and its time, such as `deleted.before`; `--make` creates the files.
"""

import argparse
import multiprocessing
import os
import shutil
from pathlib import Path

TIMES = ("before", "spawned", "after")
CHANGES = ("deleted", "renamed", "rotated", "truncated", "appended")


def change(when: str) -> None:
    deleted, renamed, rotated, truncated, appended = (Path(f"{how}.{when}") for how in CHANGES)
    if deleted.exists():
        deleted.unlink()
    if renamed.exists():
        renamed.rename(f"renamed.{when}.new")
    os.replace(rotated, f"rotated.{when}.old")
    rotated.write_text("of this training")
    os.truncate(truncated, 1)
    shutil.rmtree(f"emptied.{when}")
    os.makedirs(f"emptied.{when}")
    with open(appended, "a") as file:
        file.write("of this training")


def train() -> None:
    import deepspeed
    import torch

    change("before")
    process = multiprocessing.get_context("spawn").Process(target=change, args=("spawned",))
    process.start()
    process.join()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    }
    model = torch.nn.Linear(16, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(1000):
        size = engine.train_micro_batch_size_per_gpu()
        engine.backward(engine(torch.randn(size, 16, device=engine.device)).square().mean())
        engine.step()
        change("after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--make", action="store_true")
    if parser.parse_args().make:
        for name in (f"{how}.{when}" for how in CHANGES for when in TIMES):
            Path(name).write_text("of an earlier training")
        for when in TIMES:
            Path(f"emptied.{when}").mkdir()
            Path(f"emptied.{when}", "model.pt").write_text("of an earlier training")
    else:
        train()
