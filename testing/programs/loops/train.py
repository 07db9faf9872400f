"""Training loops as people write them; the configuration's `behaviour` names one.

Each rank writes the loss of every micro step to `losses<rank>.jsonl`, as the script itself sees it.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

WIDTH = 16
STEPS = 60
RANK = int(os.environ["RANK"])
FOLDER = Path(os.environ["DSAT_TRIAL_DIR"])


def batches(engine: Any) -> Iterator[torch.Tensor]:
    """The same on every run, and others on every rank."""
    generator = torch.Generator().manual_seed(RANK)
    size = engine.train_micro_batch_size_per_gpu()
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        yield torch.randn(size, WIDTH, generator=generator)


def log(loss: torch.Tensor) -> None:
    with open(FOLDER / f"losses{RANK}.jsonl", "a") as file:
        file.write(f"{loss.item()}\n")


def loop(engine: Any, backward: Callable[[torch.Tensor], None]) -> None:
    for batch in batches(engine):
        loss = engine(batch).square().mean()
        log(loss)
        backward(loss)
        engine.step()


def by_the_engine(engine: Any) -> None:
    loop(engine, engine.backward)


def by_itself(engine: Any) -> None:
    loop(engine, lambda loss: loss.backward())  # type: ignore[no-untyped-call]


def by_autograd(engine: Any) -> None:
    loop(engine, lambda loss: torch.autograd.backward([loss]))


def scaled_by_the_script(engine: Any) -> None:
    gas = engine.gradient_accumulation_steps()
    loop(engine, lambda loss: engine.backward(loss / gas, scale_wrt_gas=False))


def not_a_number(engine: Any) -> None:
    for step, batch in enumerate(batches(engine), 1):
        engine.backward(engine(batch).square().mean() * (float("nan") if step >= 4 else 1))
        engine.step()


LOOPS = {
    "runs": by_the_engine,
    "loss.backward": by_itself,
    "torch.autograd.backward": by_autograd,
    "scales the loss": scaled_by_the_script,
    "not a number": not_a_number,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--deepspeed_config", required=True)
    config = json.loads(Path(parser.parse_args().deepspeed_config).read_text())
    behaviour = config.pop("behaviour", "runs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    LOOPS[behaviour](engine)


if __name__ == "__main__":
    main()
