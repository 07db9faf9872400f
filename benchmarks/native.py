"""`dsat tune` against `deepspeed --autotuning tune`, both run for real on this machine.

    python -m benchmarks.native [--side 128] [--runs 3] [--rounds 5]

Both get the same script, configuration file, slot and limits: a GPT of 5 M parameters with
sequences of `--side` tokens. With 128, a trial spends most of its time in steps; with 16, in its
start. dsat runs several times, as noise decides when it ends; its run of median length counts.
Afterwards, dsat's meter measures both answers in turns, as the common stopwatch.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dsat
from benchmarks import common
from benchmarks.common import BIN, Bar
from benchmarks.record import OPTIMIZER, PROGRAM
from dsat.command import ds_config
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine, find_machine
from dsat.values.format import duration
from dsat.values.trial import Trial, TrialKind, TrialOptions
from dsat.values.zero_strategy import read_strategy

CAP = 32
# dsat's largest allowed part of the other's time, by tokens of a sequence.
MOST_TIME = {128: 0.35, 16: 0.25}
# The stopwatch cannot distinguish medians that differ by less.
STOPWATCH_NOISE = 0.02
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": OPTIMIZER,
    "zero_optimization": {"stage": [0, 1, 2, 3]},
}
AUTOTUNING = {
    "enabled": True,
    "fast": True,
    "metric": "throughput",
    "tuner_type": "model_based",
    "max_train_micro_batch_size_per_gpu": CAP,
    "results_dir": "autotuning_results",
    "exps_dir": "autotuning_exps",
}
_RESULTS = "autotuning_results"


@dataclass(frozen=True)
class Tuned:
    """Results of one tuner.

    Attributes:
        wall_s: wall time of the whole command.
        walls_s: wall times of all its runs, if there were several.
        trials: number of its trials, including the profile.
        config: the DeepSpeed configuration that it recommends.
        throughputs: samples/s of that configuration, measured several times afterwards.
    """

    name: str
    wall_s: float
    trials: int
    config: Mapping[str, Any]
    throughputs: tuple[float, ...] = ()
    walls_s: tuple[float, ...] = ()

    @property
    def throughput(self) -> float:
        return statistics.median(self.throughputs)

    def cells(self) -> list[str]:
        """Return a table row for people; see `HEADINGS`."""
        batch = ds_config.resolve_batch(self.config, 1, where="the answer")
        stage = read_strategy(self.config).stage
        wall = duration(self.wall_s)
        if len(self.walls_s) > 1:
            wall += f" ({duration(self.walls_s[0])} to {duration(self.walls_s[-1])})"
        return [
            f"`{self.name}`",
            wall,
            str(self.trials),
            f"stage {stage}, micro batch {batch.micro_batch}, gas {batch.gas}",
            f"{self.throughput:.2f} ({min(self.throughputs):.2f} to {max(self.throughputs):.2f})",
        ]


HEADINGS = ("", "wall time", "trials", "answer", "samples/s by one stopwatch")


def compare(side: int, runs: int, rounds: int) -> tuple[Tuned, Tuned]:
    """Run both tuners, then measure both answers.

    Args:
        side: tokens of a sequence.
        runs: number of runs of dsat; odd.
        rounds: number of measurements of each answer.

    Returns:
        Results of dsat and of DeepSpeed's autotuner.
    """
    machine = find_machine()
    script = _script(side)
    with tempfile.TemporaryDirectory(prefix="dsat-native-") as scratch:
        folder = Path(scratch)
        all_of_ours = [
            _dsat(_folder(folder / f"dsat{number}"), script, machine) for number in range(runs)
        ]
        ours = sorted(all_of_ours, key=lambda tuned: tuned.wall_s)[runs // 2]
        theirs = _deepspeed(_folder(folder / "deepspeed"), script, machine)
        times = _stopwatch(folder, script, machine, (ours.config, theirs.config), rounds)
    return (
        replace(ours, throughputs=times[0], walls_s=tuple(sorted(t.wall_s for t in all_of_ours))),
        replace(theirs, throughputs=times[1]),
    )


def _folder(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(PROGRAM, folder)
    config = {**CONFIG, "autotuning": AUTOTUNING}
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder


def _script(side: int) -> list[str]:
    args = ["--model", "gpt-5m", "--side", str(side), "--steps", "1000"]
    return [PROGRAM.name, *args, "--deepspeed", "--deepspeed_config", "ds_config.json"]


def _dsat(folder: Path, script: Sequence[str], machine: Machine) -> Tuned:
    command = [sys.executable, "-m", "dsat", "tune", "--train-batch-size", "any"]
    command += ["deepspeed", "--num_gpus", "1", *script]
    wall_s = common.run_well(command, folder, _environment(machine))
    trials = dsat.load_run(next((folder / "dsat_runs").iterdir())).trials
    return Tuned("dsat tune", wall_s, len(trials), _answer(folder))


def _deepspeed(folder: Path, script: Sequence[str], machine: Machine) -> Tuned:
    first_port = random.randrange(20000, 30000, 100)
    command = [str(BIN / "deepspeed"), "--autotuning", "tune", "--num_gpus", "1", "--num_nodes"]
    command += ["1", "--master_port", str(first_port), *script]
    try:
        wall_s = common.run_well(command, folder, _environment(machine))
    finally:
        _unlink_buffers(range(first_port, first_port + 100))
    trials = sum(1 for _ in (folder / _RESULTS).glob("*/exp.json"))
    return Tuned("deepspeed --autotuning tune", wall_s, trials, _answer(folder))


def _environment(machine: Machine) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(machine.num_slots)} if machine.is_cpu else {}
    return common.environment(DS_ACCELERATOR=machine.accelerator, **own)


def _answer(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / _RESULTS / "ds_config_optimal.json").read_text())
    return config


def _unlink_buffers(ports: range) -> None:
    """Unlink the buffers of DeepSpeed's CPU backend, each 66 MiB of shared memory, which it
    leaves."""
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
    """Measure the throughputs of configurations in turns, so that slow spells affect all alike."""
    base = {key: CONFIG[key] for key in ("train_micro_batch_size_per_gpu", "optimizer")}
    command = ["python3", str(PROGRAM), *script[1:]]
    options = TrialOptions(timeout_s=600.0, end_step=8)
    found: list[list[float]] = [[] for _ in configs]
    engine = common.engine_of(command, base, folder / "stopwatch", [Host(machine)], options)
    with contextlib.closing(engine):
        for number in range(rounds * len(configs)):
            which = number % len(configs)
            config = ds_config.prepare_for_training(configs[which])
            batch = ds_config.resolve_batch(config, 1, where="the answer")
            stage, overrides = read_strategy(config).stage, {**config, **batch.config()}
            trial = Trial(number, TrialKind.SEARCH, f"t{number}", stage, batch, overrides)
            outcome = common.run_trial(engine, trial)
            if outcome.metrics is None:
                raise SystemExit(f"{config} does not run: {outcome.message}")
            found[which].append(outcome.metrics.throughput)
    return [tuple(values) for values in found]


def bars(side: int, ours: Tuned, theirs: Tuned) -> list[Bar]:
    """Return the targets of a comparison, and whether they are met."""
    share, gain = ours.wall_s / theirs.wall_s, ours.throughput / theirs.throughput
    where = f"for real, sequences of {side} tokens:"
    most = MOST_TIME.get(side, 1.0)
    return [
        Bar(
            f"{where} at most {most:g} of the native autotuner's wall time",
            f"{ours.wall_s:.0f} s of {theirs.wall_s:.0f} s: {share:.2f}",
            share <= most,
        ),
        Bar(
            f"{where} an answer at least as fast (the stopwatch tells {STOPWATCH_NOISE:.0%})",
            f"{ours.throughput:.2f} to {theirs.throughput:.2f} samples/s: {gain:.3f}",
            gain >= 1 - STOPWATCH_NOISE,
        ),
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--side", type=int, default=128, metavar="N", help="tokens of a sequence")
    parser.add_argument("--runs", type=int, choices=(1, 3, 5), default=3, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    args = parser.parse_args()
    ours, theirs = compare(args.side, args.runs, args.rounds)
    common.print_head(*HEADINGS)
    for tuned in (ours, theirs):
        common.print_row(*tuned.cells())
    print(
        "\nOf what was done several times: the median (least to most).\n\n"
        f"dsat took {ours.wall_s / theirs.wall_s:.2f} times as long; its answer is "
        f"{ours.throughput / theirs.throughput:.3f} times as fast."
    )
    common.print_bars(bars(args.side, ours, theirs))


if __name__ == "__main__":
    main()
