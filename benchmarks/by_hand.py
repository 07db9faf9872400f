"""Does the command that a run prints give the throughput that the run reports?

    python -m benchmarks.by_hand [--pairs 7] [--cases NUMBER ...]

For each case dsat looks at a script's own configuration and prints how to train with it. Then, in
turns, a trial measures that configuration as a search's finals do, and a shell runs the printed
command, whose script tells its throughput by its own clock. The order changes from pair to pair, so
that a machine that slows down favours neither. Told is the ratio of both, hand to trial: the median
of the pairs. Rare steps that the host disturbed are left out of both, by the same rule.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dsat
from benchmarks import common
from benchmarks.common import Bar
from dsat.in_trial.steps import summarize
from dsat.tuning.local import local_engine
from dsat.tuning.preparation import prepare_run
from dsat.tuning.settings import Settings
from dsat.values.trial import Trial, TrialKind

PROGRAM = Path(__file__).parent / "programs" / "own_clock.py"
CLOCK = "OWN_CLOCK"
OPTIMIZER = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
WARM_UP_STEPS = 20
MOST_APART = 0.03


@dataclass(frozen=True)
class Case:
    """A script and how it is started.

    Attributes:
        name: for people.
        launcher: with which the user starts it.
        ranks: of each run.
        model, micro_batch: of the script.
        steps: that it makes by hand.
        cold: trials run in fresh processes.
    """

    name: str
    launcher: str
    ranks: int
    model: str
    micro_batch: int
    steps: int
    stage: int = 0
    cold: bool = False

    def command(self, folder: Path) -> list[str]:
        """Return the command that trains with the configuration in a folder."""
        words = [*self.launcher.split(), str(PROGRAM), "--model", self.model]
        config = ["--deepspeed_config", str(folder / "ds_config.json")]
        return [*words, "--steps", str(self.steps), *config]


CASES = (
    Case("perceptron, torchrun", "torchrun", 1, "mlp", 512, 400),
    Case("perceptron, fresh processes", "torchrun", 1, "mlp", 512, 400, cold=True),
    Case("perceptron, two ranks", "torchrun", 2, "mlp", 512, 300, stage=1),
    Case("CIFAR-10's convolutions, python3", "python3", 1, "convolutions", 32, 300),
    Case("CIFAR-10's, deepspeed, two ranks", "deepspeed", 2, "convolutions", 32, 300),
    Case("transformer, deepspeed", "deepspeed --num_gpus 1", 1, "transformer", 8, 60, stage=2),
)


@dataclass(frozen=True)
class Compared:
    """What came of a case.

    Attributes:
        step_ms: of a trial.
        pairs: throughputs of a trial and of a training by hand, samples/s.
    """

    name: str
    step_ms: float
    pairs: Sequence[tuple[float, float]]

    @property
    def ratio(self) -> float:
        """By hand to trial, in the middle of the pairs."""
        return statistics.median(hand / trial for trial, hand in self.pairs)

    @property
    def met(self) -> bool:
        return abs(self.ratio - 1) <= MOST_APART

    def cells(self) -> list[str]:
        """Return the row of a table for people; see `HEADINGS`."""
        trial, hand = (statistics.median(each) for each in zip(*self.pairs, strict=True))
        speeds = f"{self.step_ms:.1f}", f"{trial:.1f}", f"{hand:.1f}"
        return [self.name, *speeds, f"{self.ratio:.3f}", "met" if self.met else "missed"]


HEADINGS = ("script", "ms per step", "a trial, samples/s", "by hand", "ratio", "")


def compare(case: Case, folder: Path, pairs: int) -> Compared:
    """Run a case in an empty folder."""
    clock, command = folder / "clock.json", case.command(folder)
    config = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "optimizer": OPTIMIZER,
        "zero_optimization": {"stage": case.stage},
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    os.environ[CLOCK] = str(clock)
    line = _printed_command(case, command, folder / "run")
    settings = Settings(
        method="random", dry_run=True, command=tuple(command), slots=case.ranks, cold=case.cold
    )
    with prepare_run(settings) as ready:
        pass  # nothing has been acquired that a trial needs
    batch, steps_ms = ready.plan.own_batch, list[float]()
    found: list[tuple[float, float]] = []

    def measure() -> float:
        number = len(steps_ms)
        trial = Trial(number, TrialKind.SEARCH, f"t{number}", case.stage, batch, batch.config())
        outcome = common.run_trial(engine, trial)
        if outcome.metrics is None:
            raise SystemExit(f"the trial failed: {outcome.message}\n{outcome.detail}")
        steps_ms.append(outcome.metrics.latency)
        return outcome.metrics.throughput

    def type_it() -> float:
        common.run_well(["bash", "-c", line], folder, common.environment())
        seconds = [wall for wall, _ in json.loads(clock.read_text())[WARM_UP_STEPS:]]
        return batch.train_batch_size / summarize(seconds).mean

    run_dir = folder / "trials"
    run_dir.mkdir()
    with contextlib.closing(local_engine(ready, run_dir)) as engine:
        for number in range(pairs + 1):
            if number % 2:
                trial, hand = measure(), type_it()
            else:
                hand, trial = type_it(), measure()
            found.append((trial, hand))
    # What is compiled once was compiled in the first pair.
    return Compared(case.name, statistics.median(steps_ms), found[1:])


def _printed_command(case: Case, command: list[str], run_dir: Path) -> str:
    """Return what dsat prints after it has measured nothing but the user's own configuration."""
    result = dsat.tune(
        command,
        method="random",
        metric="throughput",
        devices=case.ranks,
        no_fork=case.cold,
        zero_stages=[case.stage],
        keep=["all"],
        min_micro_batch=case.micro_batch,
        max_micro_batch=case.micro_batch,
        memory_model="none",
        max_trials=2,
        finals=0,
        run_dir=run_dir,
    )
    assert result.train_command is not None and len(result.trials) == 1, result.verdict
    return result.train_command


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=7, metavar="N")
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    args = parser.parse_args()
    common.print_explanation(__doc__)
    common.print_head(*HEADINGS)
    found = []
    for number in args.cases:
        with tempfile.TemporaryDirectory(prefix="dsat-by-hand-") as scratch:
            found.append(compare(CASES[number], Path(scratch), args.pairs))
        common.print_row(*found[-1].cells())
    text = f"the printed command by hand: within {MOST_APART:.0%} of what is reported"
    said = "; ".join(f"{each.name} {each.ratio:.3f}" for each in found)
    common.print_bars([Bar(text, said, all(each.met for each in found))])


if __name__ == "__main__":
    main()
