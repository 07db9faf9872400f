"""Gradients of the installed DeepSpeed on two ranks against plain torch.

    python -m testing.gradients [CASE ...]

Tiny models train for two optimizer steps of SGD, with each ZeRO stage, precision and accumulation.
The gradient norm is computed twice: by the engine, and from the change of the weights.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsat.values import hazards

RANKS, STEPS, ROWS, LR = 2, 2, 4, 2.0
WIDTH = 16
CLIPPED = 0.05  # clips in every case: all gradients here have larger norms
_LIMIT_S = 900.0  # for all cases together


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        stage, gas, precision: ZeRO stage, accumulation steps, and `fp32` or `bf16`.
        is_shared: the model calls one of its modules twice in a forward pass.
        settings: further DeepSpeed settings.
    """

    stage: int
    gas: int = 1
    precision: str = "fp32"
    is_shared: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        parts = [f"z{self.stage}", f"gas{self.gas}", self.precision, self.note]
        return "_".join(filter(None, [*parts, "shared" if self.is_shared else ""]))

    @property
    def config(self) -> dict[str, Any]:
        zero = dict(self.settings.get("zero_optimization", {}))
        return {
            **self.settings,
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.gas,
            "gradient_clipping": self.settings.get("gradient_clipping", 0.0),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 10_000,
                "allgather_bucket_size": 10_000,
                "stage3_prefetch_bucket_size": 10_000,
                **zero,
            },
        }


_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def cases() -> Iterator[Case]:
    """Yield all trainings to compare."""
    for precision in ("fp32", "bf16"):
        for stage in range(4):
            yield from (Case(stage, gas, precision) for gas in (1, 4))
            yield Case(stage, 1, precision, is_shared=True)
            if stage:
                yield Case(stage, 4, precision, settings=_ON_HOST, note="offload")
    yield from (Case(1, gas, "bf16", settings=_FP32_SUMS, note="fp32sums") for gas in (1, 4))
    clipped = {"gradient_clipping": CLIPPED}
    yield from (Case(stage, 1, "bf16", settings=clipped, note="clipped") for stage in range(4))


def train_all(trained: Sequence[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Train all cases on `RANKS` ranks.

    Returns:
        By case name: lists `norms`, `moved` and `losses` with one value per step, or `error`.
    """
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(r, trained, folder)) for r in range(RANKS)]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + _LIMIT_S
    for rank in ranks:
        rank.join(max(0.1, end - time.monotonic()))
        rank.kill()
    files = {case.name: folder / f"{case.name}.json" for case in trained}
    none = {"error": "no result"}
    return {n: json.loads(f.read_text()) if f.exists() else none for n, f in files.items()}


def _rank(rank: int, trained: Sequence[Case], folder: Path) -> None:
    import deepspeed
    import torch

    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None  # compiles nothing
    deepspeed.init_distributed(dist_backend="gloo")
    for case in trained:
        try:
            found = _train(rank, case)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:200]}
        if rank == 0:
            (folder / f"{case.name}.json").write_text(json.dumps(found))
    os._exit(0)


def _train(rank: int, case: Case) -> dict[str, Any]:
    import deepspeed
    import torch

    model = _model(case.is_shared)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=case.config
    )
    found: dict[str, Any] = {"norms": [], "moved": [], "losses": []}
    before = _weights(model, case.stage)
    for step in range(STEPS):
        losses = []
        for micro in range(case.gas):
            data = _data(step, micro, rank)
            loss = engine(data.to(next(model.parameters()).dtype))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        after = _weights(model, case.stage)
        found["moved"].append(float((after - before).norm() / LR))
        norm = engine.get_global_grad_norm()
        found["norms"].append(None if norm is None else float(norm))
        found["losses"].append(sum(losses) / len(losses))
        before = after
    engine.destroy()
    return found


def _weights(model: Any, stage: int) -> Any:
    import deepspeed
    import torch

    parameters = list(model.parameters())
    gathered = deepspeed.zero.GatheredParameters(parameters) if stage == 3 else None
    with gathered or contextlib.nullcontext():
        return torch.cat([p.detach().double().flatten() for p in parameters]).clone()


def _model(is_shared: bool) -> Any:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.middle = torch.nn.Linear(WIDTH, WIDTH)
            self.last = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, data: Any) -> Any:
            if not is_shared:
                return (self.last(self.middle(self.first(data).tanh()).tanh()) ** 2).float().mean()
            here, there = self.first(data).tanh(), self.first(data.flip(1)).tanh()
            here, there = self.middle(here).tanh(), self.middle(there).tanh()
            return ((self.last(here) - there) ** 2).float().mean()

    torch.manual_seed(0)
    return Model()


def _data(step: int, micro: int, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def expected(case: Case) -> list[float]:
    """Return the gradient norm of each step of the same training in plain torch, in fp32."""
    import torch

    model = _model(case.is_shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(STEPS):
        for micro in range(case.gas):
            for rank in range(RANKS):
                (model(_data(step, micro, rank)) / (case.gas * RANKS)).backward()
        squares = sum(float((p.grad.double() ** 2).sum()) for p in model.parameters())
        norms.append(squares**0.5)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def faults(case: Case, seen: Mapping[str, Any], right: Sequence[float]) -> list[str]:
    """Return descriptions of the wrong gradients of a training; empty if all are right."""
    if "error" in seen:
        return [seen["error"]]
    moves = min(right[0], case.config["gradient_clipping"] or right[0])
    first = [("norm", seen["norms"][0], right[0], 0.03)]
    if case.stage < 3:  # stage 3 partitions them; the norm of step 2 shows a wrong update
        first.append(("moved", seen["moved"][0], moves, 0.1))
    found = [
        f"{what} {value:.3g} for {wanted:.3g}"
        for what, value, wanted, tolerance in first
        if value is not None and abs(value / wanted - 1) > tolerance
    ]
    later = seen["norms"][1]
    if not (found or moves < right[0]) and later is not None and abs(later / right[1] - 1) > 0.2:
        found.append(f"norm of the second step {later:.3g} for {right[1]:.3g}")
    return found


def known_faults(case: Case, version: str) -> list[hazards.Hazard]:
    """Return the faults that dsat's table of hazards lists for a training."""
    training = hazards.Training(
        case.config, case.stage, case.precision, case.gas, RANKS, on_cpu=True
    )
    return hazards.find(version, training, hazards.GRADIENTS, hazards.NORM, hazards.FAILS)


def is_as_known(case: Case, version: str, *, is_wrong: bool) -> bool:
    """Return whether the table of hazards predicts the result of a training.

    A fault that needs a model of two towers may or may not appear in a case with `is_shared`.
    """
    known = known_faults(case, version)
    certain = [h for h in known if "towers" not in h.unseen]
    return bool(certain) == is_wrong or (is_wrong and case.is_shared and bool(known))


def main(names: Sequence[str]) -> int:
    """Print each result; return 1 if one differs from the table of hazards."""
    import deepspeed
    import torch

    version = deepspeed.__version__
    print(f"torch {torch.__version__}, DeepSpeed {version}", flush=True)
    trained = [case for case in cases() if not names or any(n in case.name for n in names)]
    with tempfile.TemporaryDirectory() as folder:
        results = train_all(trained, Path(folder))
    torch.set_num_threads(1)
    unexpected = 0
    for case in trained:
        found = faults(case, results[case.name], expected(case))
        agrees = is_as_known(case, version, is_wrong=bool(found))
        unexpected += not agrees
        said = "" if agrees else " UNEXPECTED"
        print(f"{case.name}: {'; '.join(found) or 'right'}{said}")
    print(f"{len(trained)} trainings, {unexpected} not as the table of hazards says")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
