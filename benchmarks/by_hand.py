"""Does the command that a run prints give the throughput that the run reports?

    python -m benchmarks.by_hand [--pairs 7] [--cases NAME ...] [--output FILE]

For each case dsat looks at a script's own configuration and prints how to train with it. Then, in
turns, a trial measures that configuration as a search's finals do, and a shell runs the printed
command, whose script tells its throughput by its own clock. The order changes from pair to pair, so
that a machine that slows down favours neither. Told is the ratio of both, hand to trial: the median
of the pairs. Rare steps that the host disturbed are left out of both, by the same rule. The last
column is the ratio of the processor's time per step, which other programs on the machine disturb
less: on a busy machine it tells better whether both run under the same conditions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import run_trial
from dsat.app import train_command
from dsat.app.local import local_engine
from dsat.app.prepare import Prepared, prepared
from dsat.engines.local.engine import LocalEngine
from dsat.in_trial.steps import summarize
from dsat.inputs.settings import Settings
from dsat.report import summary
from dsat.tuning.events import EVENT_FINISHED, EVENT_PROPOSED, EVENT_START
from dsat.tuning.run import Run
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind

PROGRAM = Path(__file__).parent / "programs" / "own_clock.py"
BIN = Path(sys.executable).parent
CLOCK = "OWN_CLOCK"
CONFIG_FILE = "ds_config.json"
OPTIMIZER = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
WARM_UP_STEPS = 20
LEAST_WARM_UP = 2  # that of a trial
TIME_LIMIT_S = 300.0
MOST_APART = 0.03
EXPLANATION = (__doc__ or "").split("\n\n", 2)[2].strip().splitlines()


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

    def command(self) -> list[str]:
        script = [PROGRAM.name, "--model", self.model, "--steps", str(self.steps)]
        return [*self.launcher.split(), *script, "--deepspeed_config", CONFIG_FILE]


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
        trials, by_hand: throughputs of its pairs, samples/s.
        busy_trials, busy_by_hand: the first rank's processor time per step, s.
    """

    name: str
    step_ms: float
    trials: tuple[float, ...]
    by_hand: tuple[float, ...]
    busy_trials: tuple[float, ...] = ()
    busy_by_hand: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Compared:
        names = ("trials", "by_hand", "busy_trials", "busy_by_hand")
        lists = {name: tuple(data[name]) for name in names}
        return cls(**{**data, **lists})

    @property
    def ratio(self) -> float:
        """By hand to trial, in the middle of the pairs."""
        return _middle(self.by_hand, self.trials)

    @property
    def busy_ratio(self) -> float:
        """The same of the processor's time per step."""
        return _middle(self.busy_by_hand, self.busy_trials)

    @property
    def met(self) -> bool:
        return abs(self.ratio - 1) <= MOST_APART


def _middle(hands: Sequence[float], trials: Sequence[float]) -> float:
    return statistics.median(hand / trial for hand, trial in zip(hands, trials, strict=True))


def compare(case: Case, folder: Path, pairs: int) -> Compared:
    """Runs a case in an empty folder."""
    model_dir, run_dir = folder / "model", folder / "run"
    for each in (model_dir, run_dir):
        each.mkdir()
    shutil.copy(PROGRAM, model_dir)
    config = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "optimizer": OPTIMIZER,
        "zero_optimization": {"stage": case.stage},
    }
    (model_dir / CONFIG_FILE).write_text(json.dumps(config))
    own, run = Path.cwd(), Run()
    os.chdir(model_dir)  # where the user types the command
    try:
        words = tuple(case.command())
        settings = Settings(
            method="random",
            metric="throughput",
            dry_run=True,
            command=words,
            slots=case.ranks,
            cold=case.cold,
        )
        with prepared(settings) as ready:
            pass  # nothing has been acquired that a trial needs
    finally:
        os.chdir(own)
    run.apply({"event": EVENT_START, "plan": ready.plan, "info": ready.info})
    trials: list[float] = []
    hands: list[float] = []
    busy: list[float] = []
    busy_hands: list[float] = []
    clock = folder / "clock.json"
    os.environ[CLOCK] = str(clock)
    engine = local_engine(ready, run_dir)
    try:
        outcome = _measured(run, engine, ready)
        summary.write_files(run, run_dir, line := train_command.line(ready, run, run_dir))
        _by_hand(line)  # what is compiled once is compiled now

        def measure() -> None:
            metrics = _measured(run, engine, ready).metrics
            assert metrics is not None
            trials.append(metrics.throughput)
            busy.append(_per_step(clock, LEAST_WARM_UP)[1])

        def type_it() -> None:
            _by_hand(line)
            seconds, busy_s = _per_step(clock, WARM_UP_STEPS)
            hands.append(case.micro_batch * case.ranks / seconds)
            busy_hands.append(busy_s)

        for number in range(pairs):
            turns: list[Callable[[], None]] = [measure, type_it]
            for turn in turns if number % 2 == 0 else reversed(turns):
                turn()
    finally:
        engine.close()
    assert outcome.metrics is not None
    found = map(tuple, (trials, hands, busy, busy_hands))
    return Compared(case.name, outcome.metrics.latency, *found)


def _measured(run: Run, engine: LocalEngine, ready: Prepared) -> Outcome:
    """Runs the user's own configuration as a trial, and tells the run of it."""
    number, batch = len(run.trials), ready.plan.own_batch
    stage = ready.plan.base_config["zero_optimization"]["stage"]
    trial = Trial(
        number,
        TrialKind.SEARCH if number else TrialKind.BASELINE,
        f"t{number}",
        stage,
        batch,
        batch.config(),
    )
    run.apply({"event": EVENT_PROPOSED, "trial": trial})
    outcome = run_trial(engine, trial)
    if outcome.metrics is None:
        raise SystemExit(f"the trial failed: {outcome.message}\n{outcome.detail}")
    run.apply({"event": EVENT_FINISHED, "trial_id": trial.id, "outcome": outcome})
    return outcome


def _by_hand(line: str) -> None:
    """Runs the printed command in a shell; its script writes its clock."""
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])  # as in an activated environment
    told = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    if told.returncode:
        raise SystemExit(f"{line} failed:\n{(told.stdout + told.stderr)[-4000:]}")


def _per_step(clock: Path, warm_up: int) -> tuple[float, float]:
    """Seconds per step by the wall and by the processor, as the script has noted them."""
    noted = json.loads(clock.read_text())[warm_up:]
    clock.unlink()
    wall, busy = zip(*noted, strict=True)
    return summarize(wall).mean, summarize(busy).mean


def lines(found: Sequence[Compared]) -> list[str]:
    """The table for people, in Markdown."""
    rows = ["| script | ms per step | a trial, samples/s | by hand | ratio | | processor |"]
    rows.append("|---|---|---|---|---|---|---|")
    for each in found:
        trial, hand = map(statistics.median, (each.trials, each.by_hand))
        rows.append(
            f"| {each.name} | {each.step_ms:.1f} | {trial:.1f} | {hand:.1f} | {each.ratio:.3f} | "
            f"{'met' if each.met else 'missed'} | {each.busy_ratio:.3f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7, metavar="N")
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    parser.add_argument("--output", type=Path, metavar="FILE", help="the same as JSON")
    args = parser.parse_args()
    found = []
    for number in args.cases:
        with tempfile.TemporaryDirectory(prefix="dsat-by-hand-") as scratch:
            found.append(compare(CASES[number], Path(scratch), args.pairs))
        print(lines(found[-1:])[-1], file=sys.stderr, flush=True)
    print("\n".join(lines(found)))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.output, json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
