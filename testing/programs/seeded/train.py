"""A training that is the same in every run: seeded weights, and data that depend on the step.

The rows of a rank in a micro step follow from the global batch alone, so stages, buckets and
accumulation do not change the mathematics. The configuration's `behaviour` lists faults, each with
its arguments, or a way to call the backward pass. Each rank writes the loss of every micro step, as
the script computes it, to `losses<rank>.jsonl`.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, LENGTH = 64, 32, 16
STEPS = 60
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOSSES = Path(os.environ["DSAT_TRIAL_DIR"]) / f"losses{RANK}.jsonl"


class LanguageModel(nn.Module):
    """Predicts the next token from the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inside = self.norm(functional.gelu(self.hidden(self.embedding(tokens[:, :-1]))))
        logits = self.head(inside).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rows(step: int, micro_step: int, size: int, gas: int) -> torch.Tensor:
    """Return a rank's part of a step's global batch; each token determines the next one."""
    generator = torch.Generator().manual_seed(step)
    count = size * gas * RANKS
    first = torch.randint(VOCABULARY, (count, 1), generator=generator)
    tokens = (first + 7 * torch.arange(LENGTH + 1)) % VOCABULARY
    begin = (micro_step * RANKS + RANK) * size
    return tokens[begin : begin + size]


def forgets(engine: Any, name: str) -> None:
    """Hide the gradient of one parameter from the optimizer.

    On a single rank, ZeRO gives the optimizer one flat tensor with all parameters in their order.
    """
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    original = optimizer.step
    parameters = dict(engine.module.named_parameters())
    names = list(parameters)
    begin = sum(parameters[before].numel() for before in names[: names.index(name)])

    def step(*args: Any, **kwargs: Any) -> Any:
        given = optimizer.param_groups[0]["params"]
        if len(given) == len(names):
            given[names.index(name)].grad.zero_()
        else:
            [flat] = given
            flat.grad.view(-1)[begin : begin + parameters[name].numel()].zero_()
        return original(*args, **kwargs)

    optimizer.step = step


def races(engine: Any, every: str, rank: str = "0") -> None:
    """On one rank, zero a quarter of some buckets, as if it was reduced before its gradients came.

    Args:
        every: the interval of the affected buckets.
    """
    if int(rank) != RANK:
        return
    zero = engine.optimizer
    original = zero.average_tensor
    calls = itertools.count(1)

    def average(bucket: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if next(calls) % int(every) == 0:
            bucket.view(-1)[: bucket.numel() // 4].zero_()
        return original(bucket, *args, **kwargs)

    zero.average_tensor = average


def scatters(engine: Any) -> None:
    """Do not reduce whole matrices for Muon, as in DeepSpeed's issue #7807."""
    zero = engine.optimizer
    original = zero.average_tensor

    def average(*args: Any, **kwargs: Any) -> Any:
        matrix = engine.module.hidden.weight
        matrix.use_muon = False
        try:
            return original(*args, **kwargs)
        finally:
            matrix.use_muon = True

    zero.average_tensor = average


def muon(model: LanguageModel) -> torch.optim.Optimizer:
    """Make Muon for the hidden matrix, with its own Adam for the rest (FusedAdam needs a
    compiler)."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for parameter in model.parameters():
        parameter.use_muon = parameter is model.hidden.weight  # type: ignore[attr-defined]
    rest = [each for each in model.parameters() if each is not model.hidden.weight]
    matrices = {"params": [model.hidden.weight], "use_muon": True, "lr": 0.02, "momentum": 0.95}
    return MuonWithAuxAdam(  # type: ignore[no-any-return]
        [{**matrices, "weight_decay": 0.0}, {"params": rest, "use_muon": False, "lr": 1e-3}]
    )


def autocasts(engine: Any) -> None:
    """Add mixed precision in the script, which the configuration does not mention."""
    inside = torch.autocast(engine.device.type, torch.bfloat16)
    engine.module.forward = inside(engine.module.forward)


FAULTS: dict[str, Callable[..., None]] = {
    "autocasts": autocasts,
    "forgets": forgets,
    "races": races,
    "scatters": scatters,
}


def backward_of(engine: Any, behaviour: str) -> Callable[[torch.Tensor], Any]:
    """Return the function with which the script passes a loss to the backward pass."""
    gas = engine.gradient_accumulation_steps()
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "loss.backward": lambda loss: loss.backward(),  # type: ignore[no-untyped-call]
        "torch.autograd.backward": lambda loss: torch.autograd.backward([loss]),
        "scales the loss": lambda loss: engine.backward(loss / gas, scale_wrt_gas=False),
        "not a number": lambda loss: engine.backward(
            loss * (float("nan") if engine.global_steps >= 3 else 1)
        ),
    }
    by_engine: Callable[[torch.Tensor], Any] = engine.backward
    return ways.get(behaviour, by_engine)


def log(loss: torch.Tensor) -> None:
    with open(LOSSES, "a") as file:
        file.write(f"{loss.item()}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--deepspeed_config", required=True)
    config = json.loads(Path(parser.parse_args().deepspeed_config).read_text())
    behaviours = config.pop("behaviour", "runs")
    with_muon = config.pop("muon", False)
    torch.manual_seed(0)
    model = LanguageModel()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        optimizer=muon(model) if with_muon else None,
    )
    for behaviour in behaviours.split(", "):
        fault, *what = behaviour.split()
        if fault in FAULTS:
            FAULTS[fault](engine, *what)
    backward = backward_of(engine, behaviours)
    size, gas = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for step, micro_step in itertools.product(range(STEPS), range(gas)):
        loss = engine(rows(step, micro_step, size, gas).to(engine.device))
        log(loss)
        backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
