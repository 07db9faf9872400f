"""Steps of two and four ranks on this machine's cores, projected from a step of one: a table.

    python3 -m benchmarks.projection_on_cpu [--stages N ...] [--rounds N]

The one rank's measured step corrects the projection, as `dsat project --from RUN` does; the machine
is measured as `--to Nxhere` does, with as many processes as there are ranks. The bar is an
error of 15 %.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from dsat.app import project
from dsat.app.estimate import simulator_of
from dsat.app.project import Traced
from dsat.inputs.cards import Card
from dsat.inputs.project_settings import ProjectSettings
from dsat.prepare import probe
from dsat.search.projected_speed import ProjectedSpeed
from dsat.search.traced_work import Cluster, hardware_of
from dsat.values.zero_strategy import Strategy

SCRIPT = Path(__file__).parent / "programs" / "steps" / "train.py"
_MICRO_BATCH, _STEPS, _RANKS = 4, 8, (2, 4)
_LIMIT_S = 300.0


def _config(strategy: Strategy) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": _MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": strategy.stage, "reduce_bucket_size": 5_000_000},
    }


def measured(config: Mapping[str, Any], ranks: int, folder: Path) -> float:
    """Return the median seconds of a step of real ranks, with one thread each."""
    path = folder / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(SCRIPT), "--deepspeed_config", str(path), "--steps", str(_STEPS)]
    env = common.environment(OMP_NUM_THREADS="1", LOCAL_SIZE=str(ranks))
    words = [*launcher, f"--nproc-per-node={ranks}", *script]
    status, said, _ = common.run(words, folder, env, timeout_s=_LIMIT_S)
    found = re.findall(r'^\{"step_s": (.*)\}$', said, flags=re.MULTILINE)
    if status or not found:
        raise SystemExit(f"{ranks} ranks did not train:\n{said[-2000:]}")
    return float(found[-1])


def projected(traced: Traced, strategy: Strategy, ranks: int, alone: Card, one_s: float) -> float:
    """Return the seconds of a step of ranks here, corrected by a measured step of one.

    Args:
        alone: this machine with one process.
        one_s: the measured seconds of its step.
    """
    card, error = probe.card_here(ranks), np.array([0.02])
    speed = ProjectedSpeed(hardware_of(card), [strategy])
    work = traced.work(strategy, _MICRO_BATCH, Cluster.of(alone, 1))
    run = speed.points(work, strategy, _MICRO_BATCH, 1)
    speed = speed.calibrated(hardware_of(alone), run, np.log([one_s]), error)
    work = traced.work(strategy, _MICRO_BATCH, Cluster.of(card, ranks))
    return speed.predict(speed.points(work, strategy, _MICRO_BATCH, 1)).seconds


def compared(traced: Traced, strategy: Strategy, folder: Path, rounds: int) -> None:
    """Print measured and projected seconds of a step, and the largest error of a round.

    Machine and ranks are measured in turns, since other work on the machine comes and goes.
    """
    config = _config(strategy)
    pairs: dict[int, list[tuple[float, float]]] = {ranks: [] for ranks in _RANKS}
    for _ in range(rounds):
        alone, one_s = probe.card_here(1), measured(config, 1, folder)
        for ranks in _RANKS:
            found = projected(traced, strategy, ranks, alone, one_s)
            pairs[ranks].append((measured(config, ranks, folder), found))
    for ranks, both in pairs.items():
        real, found = (statistics.median(each) for each in zip(*both, strict=True))
        largest = max((found / real - 1 for real, found in both), key=abs)
        times = f"{1000 * real:.0f} ms", f"{1000 * found:.0f} ms"
        errors = f"{100 * (found / real - 1):+.1f} %", f"{100 * largest:+.1f} %"
        common.print_row(strategy.label, ranks, *times, *errors)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    strategies = [Strategy(stage) for stage in args.stages]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ds_config = folder / "own.json"
        ds_config.write_text(json.dumps(_config(strategies[0])), encoding="utf-8")
        words = (str(SCRIPT), "--deepspeed_config", str(ds_config))
        with simulator_of(ProjectSettings(command=words), as_cpu=True) as (_, base, simulator):
            traced = project.trace(base, simulator, max(_RANKS), lambda _: strategies)
        numbers = ("ranks", "measured", "projected", "error", "largest of a round")
        common.print_head("strategy", *numbers, numbers=numbers)
        for strategy in strategies:
            compared(traced, strategy, folder, args.rounds)


if __name__ == "__main__":
    main()
