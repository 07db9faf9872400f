"""Record tables of real trials: every setting of a grid at every micro batch, up to out of memory.

    python -m benchmarks.record [--data DIR] [NAME ...]

Without names, records all tables, on the CPU cores of this machine. An interrupted recording is
continued; a finished table stays unchanged. The micro batches of each setting double until one is
out of memory; then bisection finds the edge to within a sixth. Larger micro batches need more
memory, so they are not run. Further passes run all successful trials again, pass by pass, so that
slow spells of the machine affect all alike.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import common, searching, tables
from benchmarks.common import GIB
from benchmarks.ledger import STAGES
from benchmarks.tables import Header, Row
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine, find_machine
from dsat.run.journal import Journal
from dsat.simulation import anchors
from dsat.space.overrides import overrides_for
from dsat.space.plan import BY_SIMULATION
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

PROGRAM = Path(__file__).parent / "programs" / "train.py"
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": OPTIMIZER}
# One warm-up step, then two measured ones, or three if these differ. Passes repeat the measurement.
START_STEP, END_STEP, MAX_STEPS = 2, 3, 3


def grid(**settings: Sequence[Any]) -> list[dict[str, Any]]:
    """Return all combinations of the settings' values."""
    combinations = itertools.product(*settings.values())
    return [dict(zip(settings, values, strict=True)) for values in combinations]


# The settings that matter most on one slot (see dsat/space/space.py), each small and large.
SETTINGS = tuple(
    grid(stage=[0])
    + grid(stage=[1, 2], reduce_bucket_size=[5 * 10**6, 10**8])
    + grid(stage=[3], reduce_bucket_size=[5 * 10**6], sub_group_size=[10**9, 10**7])
)


@dataclass(frozen=True)
class Spec:
    """A table to record.

    Attributes:
        model, side: arguments of the program (`--model`, `--side`).
        slot_memory_bytes: memory of the slot, small enough that the grid ends out of memory.
        largest: the largest micro batch to try.
        passes: number of measurements of each successful trial.
    """

    name: str
    model: str
    side: int
    slot_memory_bytes: int
    settings: Sequence[Mapping[str, Any]] = SETTINGS
    largest: int = 4096
    passes: int = 3


SPECS = (
    Spec("cpu-gpt2-small", "gpt2-small", 16, int(3.5 * GIB)),
    Spec("cpu-gpt-wide", "gpt-wide", 16, int(2.65 * GIB), largest=32),
    Spec("cpu-resnet50", "resnet50", 64, int(0.9 * GIB)),
    Spec("cpu-gpt2-small-lora", "gpt2-small-lora", 16, int(1.2 * GIB)),
)


def next_size(known: Mapping[int, bool], largest: int) -> int | None:
    """Return the next micro batch to try with some settings, or None if their edge is known.

    Args:
        known: the micro batches tried so far, and whether each ran.
        largest: the largest micro batch to try.
    """
    size = 1
    while known.get(size) and 2 * size <= largest:
        size *= 2
    if size not in known:
        return size
    ran = max((tried for tried, ok in known.items() if ok), default=0)
    failed = min((tried for tried, ok in known.items() if not ok), default=None)
    if failed is None or failed - ran <= max(1, ran // 6):
        return None
    return (ran + failed) // 2


def next_trial(
    spec: Spec, recorded: Iterable[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], int, int] | None:
    """Return settings, micro batch and pass of the next trial; None if the table is complete.

    Args:
        recorded: rows with their passes, in the order of recording.
    """
    rows = [(Row.from_json(event), tables.pass_of(event)) for event in recorded]
    for settings in spec.settings:
        mine = [row for row, number in rows if number == 1 and row.settings == settings]
        size = next_size({row.micro_batch: row.outcome.ok for row in mine}, spec.largest)
        if size is not None:
            return settings, size, 1
    done = [(row.settings, row.micro_batch, number) for row, number in rows]
    for number in range(2, spec.passes + 1):
        for row, first in rows:
            following = (row.settings, row.micro_batch, number)
            if first == 1 and row.outcome.ok and following not in done:
                return following
    return None


def record(spec: Spec, machine: Machine, folder: Path) -> Path:
    """Record a table, or continue with it.

    Args:
        folder: for the table; the trials' own folders are deleted.

    Returns:
        The finished, compressed table.

    Raises:
        SystemExit: a trial failed for another reason than memory.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{spec.name}{tables.SUFFIX}"
    with Journal(path) as journal, _engine(spec, machine) as engine:
        begun = journal.events[0]["ds_config"] if journal.events else CONFIG
        if begun != CONFIG:
            raise SystemExit(f"{path} was begun with other settings; delete it to begin anew")
        _fill(spec, machine, engine, journal)
    finished = tables.compress(path)
    path.unlink()
    return finished


def predict(spec: Spec, machine: Machine, path: Path) -> None:
    """Simulate the memory of a finished table's strategies, and add the result to its header."""
    table = tables.read(path)
    plan = replace(searching.plan_of(table, "model"), memory_model=BY_SIMULATION)
    profile = table.header.profile
    configs = searching.reference_configs(plan, profile)
    with _engine(spec, machine) as engine:
        basis = anchors.simulate_strategies(
            engine, plan, profile, configs, as_cpu=machine.is_cpu, say=print
        )
    if not basis.simulated:
        raise SystemExit(f"{spec.name}: {basis.note}")
    tables.with_memory(path, basis.to_json())


def _fill(spec: Spec, machine: Machine, engine: LocalEngine, journal: Journal) -> None:
    """Run the missing trials of a table."""
    numbers = itertools.count()
    profile = _profile(spec, engine, numbers)
    if profile.profile is None:
        raise SystemExit(f"{spec.name}: the profile is {profile.kind.value}: {profile.message}")
    if not journal.events:
        about = common.about_machine(machine)
        header = _header(spec, profile.profile, profile.duration_s, about)
        journal.append({"event": "table", **header.to_json()})
    recorded = list(journal.events[1:])  # rows of earlier calls; a copy, extended below
    while (following := next_trial(spec, recorded)) is not None:
        settings, size, number = following
        trial = _trial(next(numbers), TrialKind.SEARCH, settings, size)
        what = f"{json.dumps(settings)} at micro batch {size}"
        outcome = _run(engine, trial, what)
        # The log of an expected failure is large and useless.
        row = Row(settings, size, replace(outcome, detail=""))
        recorded.append(tables.of_pass(row, number))
        journal.append(recorded[-1])
        said = f"{outcome.metrics.throughput:.3g}/s" if outcome.metrics else outcome.kind.value
        took = f"({outcome.duration_s:.1f} s)"
        print(f"{spec.name} {what}, pass {number}: {said} {took}", flush=True)


def _profile(spec: Spec, engine: LocalEngine, numbers: Iterator[int]) -> Outcome:
    """Return the profile of the first stage that fits, with the first settings of each stage."""
    outcome = Outcome(OutcomeKind.OOM)
    for stage in STAGES:
        own = next((one for one in spec.settings if one["stage"] == stage), {"stage": stage})
        trial = _trial(next(numbers), TrialKind.PROFILE, own, 1)
        outcome = _run(engine, trial, f"the profile in stage {stage}")
        if outcome.ok:
            break
    return outcome


def _run(engine: LocalEngine, trial: Trial, what: str) -> Outcome:
    """Run a trial, whose only allowed failure is out of memory."""
    outcome = common.run_trial(engine, trial)
    if outcome.kind not in (OutcomeKind.OK, OutcomeKind.OOM):
        raise SystemExit(
            f"{what}: {outcome.kind.value}: {outcome.message}\n{outcome.detail}\n"
            "Run the command again to go on."
        )
    return outcome


def _header(
    spec: Spec, profile: ModelProfile, profile_duration_s: float, about: Mapping[str, Any]
) -> Header:
    return Header(
        name=spec.name,
        command=f"{PROGRAM.name} --model {spec.model} --side {spec.side}",
        ds_config=CONFIG,
        slots=1,
        slot_memory_bytes=spec.slot_memory_bytes,
        profile=profile,
        profile_duration_s=profile_duration_s,
        about={
            **about,
            "passes": spec.passes,
            "measured steps": f"{END_STEP - START_STEP + 1} to {MAX_STEPS}",
        },
    )


def _trial(number: int, kind: TrialKind, settings: Mapping[str, Any], size: int) -> Trial:
    batch = BatchTriple(size, size, 1)
    overrides = overrides_for(settings, batch)
    return Trial(number, kind, f"t{number}", settings["stage"], batch, overrides)


@contextlib.contextmanager
def _engine(spec: Spec, machine: Machine) -> Iterator[LocalEngine]:
    """Make an engine in a temporary folder."""
    command = ["python3", str(PROGRAM), "--model", spec.model, "--side", str(spec.side)]
    command += ["--steps", "1000", "--deepspeed", "--deepspeed_config", "ds_config.json"]
    options = TrialOptions(
        timeout_s=600.0,
        slot_memory_bytes=spec.slot_memory_bytes,
        start_step=START_STEP,
        end_step=END_STEP,
        max_steps=MAX_STEPS,
    )
    hosts = [Host(machine)]
    with (
        tempfile.TemporaryDirectory(prefix="dsat-record-") as scratch,
        contextlib.closing(
            common.engine_of(command, CONFIG, Path(scratch), hosts, options)
        ) as engine,
    ):
        yield engine


def main() -> None:
    parser = common.parser(__doc__)
    known = [spec.name for spec in SPECS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--data", type=Path, default=tables.DATA, metavar="DIR")
    args = parser.parse_args()
    common.choose(args.names, known, parser)
    machine = find_machine()
    if not machine.is_cpu:
        sys.exit(f"the tables are of CPU cores, and this is {machine.describe()}")
    for spec in (spec for spec in SPECS if spec.name in (args.names or known)):
        path = args.data / f"{spec.name}{tables.SUFFIX}.gz"
        if path.exists():
            print(f"{path}: recorded before")
        else:
            record(spec, machine, args.data)
        if tables.read(path).header.memory is None:
            predict(spec, machine, path)


if __name__ == "__main__":
    main()
