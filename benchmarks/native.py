"""For real: `dsat tune` against `deepspeed --autotuning tune`, on this machine.

    python -m benchmarks.native [--side 128] [--tuner TYPE] [--runs 3] [--rounds 5] [--output FILE]

Both get the same script, configuration file, slot and limits: a 5 M parameter GPT, sequences of as
many tokens as `--side` says. With 128 a trial's steps take most of its time, with 16 its start.
dsat is run several times, since noise decides when it ends; its run of median length counts. Both
answers are then measured by one stopwatch, dsat's meter, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import run_trial
from benchmarks.record import OPTIMIZER, PROGRAM
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import LocalOptions
from dsat.engines.local.machine import Machine, find_machine
from dsat.inputs import ds_config, entrypoint, experiment
from dsat.inputs.autotuning_section import SECTION
from dsat.report.format import duration
from dsat.tuning.journal import FILE_NAME, read_events
from dsat.tuning.run import Run
from dsat.values.files import write_atomically
from dsat.values.trial import Trial, TrialKind, TrialOptions
from dsat.values.zero_strategy import of_config

BIN = Path(sys.executable).parent
CAP = 32
TIME_LIMIT_S = 3600.0
SIDE = 128
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": OPTIMIZER,
    "zero_optimization": {"stage": [0, 1, 2, 3]},
}
AUTOTUNING = {
    "enabled": True,
    "fast": True,
    "metric": "throughput",
    "max_train_micro_batch_size_per_gpu": CAP,
}
_RESULTS = "autotuning_results"


@dataclass(frozen=True)
class Tuned:
    """What one of the two did.

    Attributes:
        wall_s: of the whole command.
        walls_s: of all its runs, if there were several.
        trials: that it ran, its profile included.
        config: the DeepSpeed configuration that it recommends.
        throughputs: samples/s of that configuration, measured several times afterwards.
    """

    name: str
    command: str
    wall_s: float
    trials: int
    config: Mapping[str, Any]
    throughputs: tuple[float, ...] = ()
    walls_s: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tuned:
        lists = {name: tuple(data[name]) for name in ("throughputs", "walls_s")}
        return cls(**{**data, **lists})

    @property
    def throughput(self) -> float:
        return statistics.median(self.throughputs)


def compare(side: int, tuner: str, runs: int, rounds: int) -> tuple[Tuned, Tuned]:
    """Runs both tuners, then measures both answers.

    Args:
        side: tokens of a sequence.
        tuner: `tuner_type`; the other's fast mode knows only one way.
        runs: how often dsat is run, an odd number.
        rounds: how often each answer is measured.

    Returns:
        What dsat and what DeepSpeed's autotuner did.
    """
    machine = find_machine()
    script = _script(side)
    with tempfile.TemporaryDirectory(prefix="dsat-native-") as scratch:
        folder = Path(scratch)
        all_of_ours = [
            _dsat(_folder(folder / f"dsat{number}", tuner), script, machine)
            for number in range(runs)
        ]
        ours = sorted(all_of_ours, key=lambda tuned: tuned.wall_s)[runs // 2]
        theirs = _deepspeed(_folder(folder / "deepspeed", tuner), script, machine)
        times = _stopwatch(folder, script, machine, (ours.config, theirs.config), rounds)
    return (
        replace(ours, throughputs=times[0], walls_s=tuple(sorted(t.wall_s for t in all_of_ours))),
        replace(theirs, throughputs=times[1]),
    )


def _folder(folder: Path, tuner: str) -> Path:
    folder.mkdir()
    shutil.copy(PROGRAM, folder)
    config = {**CONFIG, SECTION: {**AUTOTUNING, "tuner_type": tuner}}
    (folder / "ds_config.json").write_text(json.dumps(config, indent=2))
    return folder


def _script(side: int) -> list[str]:
    args = ["--model", "gpt-5m", "--side", str(side), "--steps", "1000"]
    return [PROGRAM.name, *args, "--deepspeed", "--deepspeed_config", "ds_config.json"]


def _dsat(folder: Path, script: Sequence[str], machine: Machine) -> Tuned:
    command = [sys.executable, "-m", "dsat", "tune", "--num_gpus", "1", *script]
    wall_s = _run(command, folder, machine)
    run = Run(read_events(folder / _RESULTS / FILE_NAME))
    return Tuned("dsat tune", _said(command), wall_s, len(run.outcomes), _answer(folder))


def _deepspeed(folder: Path, script: Sequence[str], machine: Machine) -> Tuned:
    first_port = random.randrange(20000, 30000, 100)
    command = [str(BIN / "deepspeed"), "--autotuning", "tune", "--num_gpus", "1", "--num_nodes"]
    command += ["1", "--master_port", str(first_port), *script]
    try:
        wall_s = _run(command, folder, machine)
    finally:
        _unlink_buffers(range(first_port, first_port + 100))
    trials = sum(1 for _ in (folder / _RESULTS).glob("*/exp.json"))
    return Tuned("deepspeed --autotuning tune", _said(command), wall_s, trials, _answer(folder))


def _said(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


def _run(command: Sequence[str], folder: Path, machine: Machine) -> float:
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
        "DS_ACCELERATOR": machine.accelerator,
    }
    if machine.is_cpu:
        env |= {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(machine.num_slots)}
    log = folder / "log.txt"
    began = time.perf_counter()
    with open(log, "wb") as file:
        status = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT_S,
            check=False,
        ).returncode
    wall_s = time.perf_counter() - began
    if status != 0:
        raise SystemExit(f"{_said(command)} ended with status {status}:\n{log.read_text()[-4000:]}")
    return wall_s


def _answer(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / _RESULTS / "ds_config_optimal.json").read_text())
    return config


def _unlink_buffers(ports: range) -> None:
    """DeepSpeed's CPU backend never does; each is 66 MiB of shared memory."""
    for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
        if int(path.name.split("_")[-2]) in ports:
            path.unlink()


def _stopwatch(
    folder: Path,
    script: Sequence[str],
    machine: Machine,
    configs: Sequence[Mapping[str, Any]],
    rounds: int,
) -> list[tuple[float, ...]]:
    """The throughputs of configurations, measured in turns so that they share slow spells."""
    model_dir = folder / "stopwatch"
    model_dir.mkdir()
    shutil.copy(PROGRAM, model_dir)
    base = {key: CONFIG[key] for key in ("train_micro_batch_size_per_gpu", "optimizer")}
    (model_dir / "ds_config.json").write_text(json.dumps(base))
    command = ["python3", *script]
    user = experiment.of_command(command, "stopwatch", model_dir, model_dir / "ds_config.json")
    program = entrypoint.parse(user.entrypoint, model_dir)
    options = LocalOptions(TrialOptions(timeout_s=600.0, end_step=8))
    engine = LocalEngine(user, program, [Host(machine)], model_dir, options, slots_per_trial=1)
    found: list[list[float]] = [[] for _ in configs]
    try:
        for number in range(rounds * len(configs)):
            which = number % len(configs)
            config = ds_config.for_use(configs[which])
            batch = ds_config.resolve_batch(config, 1, where="the answer")
            stage = of_config(config).stage
            overrides = {**config, **batch.config()}
            name = f"t{number}"
            trial = Trial(number, TrialKind.SEARCH, name, stage, batch, overrides)
            outcome = run_trial(engine, trial)
            if outcome.metrics is None:
                raise SystemExit(f"{config} does not run: {outcome.message}")
            found[which].append(outcome.metrics.throughput)
    finally:
        engine.close()
    return [tuple(values) for values in found]


def lines(ours: Tuned, theirs: Tuned) -> list[str]:
    """The comparison for people, in Markdown."""
    rows = [
        "| | wall time | trials | answer | samples/s by one stopwatch |",
        "|---|---|---|---|---|",
    ]
    for tuned in (ours, theirs):
        stage = of_config(tuned.config).stage
        batch = ds_config.resolve_batch(tuned.config, 1, where="the answer")
        spread = f"{min(tuned.throughputs):.2f} to {max(tuned.throughputs):.2f}"
        wall = duration(tuned.wall_s)
        if len(tuned.walls_s) > 1:
            wall += f" ({duration(tuned.walls_s[0])} to {duration(tuned.walls_s[-1])})"
        rows.append(
            f"| `{tuned.name}` | {wall} | {tuned.trials} | stage {stage}, micro "
            f"batch {batch.micro_batch}, gas {batch.gas} | {tuned.throughput:.2f} ({spread}) |"
        )
    rows += ["", "Of what was done several times: the median (least to most).", ""]
    rows.append(
        f"dsat took {ours.wall_s / theirs.wall_s:.2f} times as long; its answer is "
        f"{ours.throughput / theirs.throughput:.3f} times as fast."
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    types = ("gridsearch", "random", "model_based")
    parser.add_argument("--side", type=int, default=SIDE, metavar="N", help="tokens of a sequence")
    parser.add_argument("--tuner", choices=types, default="model_based", metavar="TYPE")
    parser.add_argument("--runs", type=int, choices=(1, 3, 5), default=3, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as JSON")
    args = parser.parse_args()
    ours, theirs = compare(args.side, args.tuner, args.runs, args.rounds)
    print("\n".join(lines(ours, theirs)))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps([asdict(ours), asdict(theirs)], indent=1))


if __name__ == "__main__":
    main()
