"""Records tables of real trials: every setting of a grid at every micro batch, up to out of memory.

    python -m benchmarks.record [--list] [--passes N] [--concurrent N] [--data DIR] [NAME ...]

Without names, all tables of this machine's accelerator. A recording that was killed goes on where
it was; a table that is there stays as it is. The micro batches of each setting double until one is
out of memory; then the edge is bisected until it is known to a sixth. Larger ones are not run: they
need more memory. Further passes measure all that ran once more, one after the other, so that a
machine's slow spells meet all of them alike.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import tables
from benchmarks.common import run_trial
from benchmarks.grid import Cell, Grid
from benchmarks.ledger import STAGES
from benchmarks.peers.ours import plan_of
from benchmarks.tables import Header, Row
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import LocalOptions
from dsat.engines.local.machine import Machine, find_machine
from dsat.inputs import entrypoint, experiment
from dsat.inputs.settings import BY_SIMULATION
from dsat.inputs.switches import CHECKPOINTING, is_switch
from dsat.memory import anchors
from dsat.report.format import duration
from dsat.space.overrides import overrides_for, script_args_for
from dsat.tuning.journal import Journal, MemoryJournal
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

PROGRAM = Path(__file__).parent / "programs" / "train.py"
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
MIB, GIB = 2**20, 2**30
# One warm-up step, then two measured ones, or three where these differ: passes do the rest.
START_STEP, END_STEP, MAX_STEPS = 2, 3, 3
_FIRST_PROFILE = 10**6  # number of a trial, above those of the grid
VERSIONS = ("torch", "deepspeed", "transformers", "torchvision")


def grid(**knobs: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations of the values of knobs."""
    combinations = itertools.product(*knobs.values())
    return [dict(zip(knobs, values, strict=True)) for values in combinations]


Settings = list[dict[str, Any]]

# What matters most on one slot (see dsat/space/space.py): a small and a large size of each.
SETTINGS = tuple(
    grid(stage=[0])
    + grid(stage=[1, 2], reduce_bucket_size=[5 * 10**6, 10**8])
    + grid(stage=[3], reduce_bucket_size=[5 * 10**6], sub_group_size=[10**9, 10**7])
)


# What matters on two slots: buckets, what is gathered, and what stage 3 keeps. Processor cores have
# no streams to overlap communication on, and `overlap_comm` changes nothing without accumulation.
TWO_SLOTS = tuple(
    grid(stage=[0])
    + grid(
        stage=[1, 2],
        reduce_bucket_size=[5 * 10**5, 10**7],
        allgather_bucket_size=[10**8, 5 * 10**5],
    )
    + grid(
        stage=[3],
        reduce_bucket_size=[5 * 10**6],
        stage3_prefetch_bucket_size=[5 * 10**4, 5 * 10**7],
        stage3_param_persistence_threshold=[10**5, 0],
    )
)
CHECKPOINTED = tuple(
    {**settings, CHECKPOINTING: is_on} for settings in TWO_SLOTS[:7:2] for is_on in (False, True)
)


@dataclass(frozen=True)
class Spec:
    """A table to record.

    Attributes:
        accelerator: where it is recorded.
        model, side: of the program (`--model`, `--side`).
        slot_memory_bytes: what the slot may use; small enough that the grid ends in out of memory.
        config: keys of the DeepSpeed configuration besides the optimizer.
        seconds_per_trial: measured on a quiet machine; to tell people how long it takes.
        largest: no micro batch above this is tried.
        passes: how often each trial that runs is measured.
        slots: of every trial.
        steps: the first measured, the last, and the most while an interval is too wide.
        interval: a trial whose 95 % interval is wider, as a fraction, is measured again, in as
            many passes as there may be; without it every trial is measured in all passes.
    """

    name: str
    accelerator: str
    model: str
    side: int
    slot_memory_bytes: int
    seconds_per_trial: float
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[Mapping[str, Any]] = SETTINGS
    largest: int = 4096
    passes: int = 1
    slots: int = 1
    steps: tuple[int, int, int] = (START_STEP, END_STEP, MAX_STEPS)
    interval: float = 0.0

    @property
    def ds_config(self) -> dict[str, Any]:
        return {"train_micro_batch_size_per_gpu": 1, "optimizer": OPTIMIZER, **self.config}

    @property
    def switches(self) -> dict[str, bool]:
        """The script's own switches that the settings differ in, as its user has them."""
        found = {key for settings in self.settings for key in settings if is_switch(key)}
        return dict.fromkeys(found, False)


# At least ten steps, and ever more of them until the interval is narrow.
_LONG = (START_STEP, START_STEP + 9, 15)


def _two_slots(name: str, model: str, side: int, memory_bytes: int, **rest: Any) -> Spec:
    """A table with real communication."""
    about = {"passes": 2, "slots": 2, "steps": _LONG, "interval": 0.03, "settings": TWO_SLOTS}
    return Spec(name, "cpu", model, side, memory_bytes, 5.0, **{**about, **rest})


_BF16 = {"bf16": {"enabled": True}}
SPECS = (
    Spec("cpu-gpt2-small", "cpu", "gpt2-small", 16, int(3.5 * GIB), 13.0, passes=3),
    Spec("cpu-gpt-wide", "cpu", "gpt-wide", 16, int(2.65 * GIB), 10.0, largest=32, passes=3),
    Spec("cpu-resnet50", "cpu", "resnet50", 64, int(0.9 * GIB), 6.0, passes=3),
    Spec("cpu-gpt2-small-lora", "cpu", "gpt2-small-lora", 16, int(1.2 * GIB), 8.0, passes=3),
    # The gradients' accumulation is limited by the batch; all stages fit.
    _two_slots(
        "cpu2-gpt-fixed-batch", "gpt-5m", 32, 640 * MIB, config={"train_batch_size": 64}, largest=16
    ),
    # Stage 0 does not fit, the stages above with ever more samples.
    _two_slots("cpu2-gpt-stage3", "gpt-25m", 32, 480 * MIB, largest=16),
    _two_slots("cpu2-gpt-checkpointing", "gpt-5m", 64, 400 * MIB, settings=CHECKPOINTED),
    _two_slots("cpu2-gpt-lora", "gpt-25m-lora", 32, 400 * MIB, largest=32),
    Spec("gpu-gpt2-small", "cuda", "gpt2-small", 512, 16 * GIB, 6.0, _BF16),
    Spec("gpu-gpt2-medium", "cuda", "gpt2-medium", 512, 24 * GIB, 7.0, _BF16),
    Spec("gpu-gpt-1.3b", "cuda", "gpt-1.3b", 512, 80 * GIB, 12.0, _BF16),
    Spec("gpu-resnet50", "cuda", "resnet50", 224, 16 * GIB, 6.0, _BF16),
)


def record(spec: Spec, machine: Machine, folder: Path, *, concurrent: int = 1) -> Path:
    """Records a table, or goes on with it.

    Args:
        folder: for the table; the trials' own folders are thrown away.
        concurrent: trials at once, each on a slot of its own.

    Returns:
        The finished, compressed table.

    Raises:
        SystemExit: a trial failed for another reason than memory.
    """
    path = folder / f"{spec.name}{tables.SUFFIX}"
    with Journal(path) as journal, tempfile.TemporaryDirectory(prefix="dsat-record-") as scratch:
        _check_same(spec, journal)
        engine = _engine(spec, machine, Path(scratch))
        try:
            _fill(spec, machine, engine, journal, concurrent)
        finally:
            engine.close()
    finished = tables.compress(path)
    path.unlink()
    return finished


def finish(spec: Spec, machine: Machine, folder: Path, *, concurrent: int = 1) -> Path:
    """Does what is left to do of a table: the recording, and the simulation of its memory.

    Args:
        folder: for the table; made if it is missing.
        concurrent: trials at once.

    Returns:
        The table.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{spec.name}{tables.SUFFIX}.gz"
    if path.exists():
        print(f"{path}: recorded before")
    else:
        began = time.monotonic()
        record(spec, machine, folder, concurrent=concurrent)
        print(f"{path}: {duration(time.monotonic() - began)}", flush=True)
    if tables.read(path).header.memory is None:
        began = time.monotonic()
        predict(spec, machine, path)
        print(f"{path}: simulated in {duration(time.monotonic() - began)}", flush=True)
    return path


def predict(spec: Spec, machine: Machine, path: Path) -> None:
    """Simulates the memory of a finished table's strategies, and enters that in its header."""
    table = tables.read(path)
    tuner = Tuner(replace(plan_of(table, "model"), memory_model=BY_SIMULATION), MemoryJournal())
    tuner.next_trials(1)
    tuner.record(0, table.profile_outcome)
    with tempfile.TemporaryDirectory(prefix="dsat-record-") as scratch:
        engine = _engine(spec, machine, Path(scratch))
        try:
            basis = anchors.of_run(
                engine,
                tuner.plan,
                table.header.profile,
                tuner.decisions.reference_configs(),
                as_cpu=machine.is_cpu,
                say=print,
            )
        finally:
            engine.close()
    if not basis.simulated:
        raise SystemExit(f"{spec.name}: {basis.note}")
    tables.with_memory(path, basis.to_json())


def _fill(
    spec: Spec, machine: Machine, engine: LocalEngine, journal: Journal, concurrent: int
) -> None:
    profile = _profile(spec, engine)
    if profile.profile is None:
        raise SystemExit(f"{spec.name}: the profile is {profile.kind.value}: {profile.message}")
    if not journal.events:
        about = {**about_machine(machine), "concurrent trials": concurrent}
        header = _header(spec, profile.profile, profile.duration_s, about)
        journal.append({"event": "table", **header.to_json()})
    todo = Grid(
        spec.settings, spec.largest, spec.passes, journal.events[1:], interval=spec.interval
    )
    running: dict[int, Cell] = {}
    numbers = itertools.count(1)
    while True:
        while len(running) < concurrent and (cell := todo.begin()) is not None:
            number = next(numbers)
            settings = spec.settings[cell.settings]
            running[number] = cell
            engine.launch(_trial(spec, number, TrialKind.SEARCH, settings, cell.micro_batch))
        if not running:
            return
        for number, outcome in engine.poll(5.0):
            cell = running.pop(number)
            settings = spec.settings[cell.settings]
            what = f"{json.dumps(settings)} at micro batch {cell.micro_batch}"
            _refuse(outcome, what)
            # The log of an expected failure is of no use, and large.
            kept = replace(outcome, detail="")
            row = Row(settings, cell.micro_batch, 1, spec.slots, kept)
            journal.append(tables.of_pass(row, cell.number))
            todo.end(cell, outcome)
            said = f"{outcome.metrics.throughput:.3g}/s" if outcome.metrics else outcome.kind.value
            print(
                f"{spec.name} {what}, pass {cell.number}: {said} ({outcome.duration_s:.1f} s)",
                flush=True,
            )


def _profile(spec: Spec, engine: LocalEngine) -> Outcome:
    """Return the profile of the first stage that fits, with the first settings of each."""
    outcome = Outcome(OutcomeKind.OOM)
    for number, stage in enumerate(STAGES):
        own = next((one for one in spec.settings if one["stage"] == stage), {"stage": stage})
        settings = {**own, **spec.switches}
        trial = _trial(spec, _FIRST_PROFILE + number, TrialKind.PROFILE, settings, 1)
        outcome = run_trial(engine, trial)
        _refuse(outcome, f"the profile in stage {stage}")
        if outcome.ok:
            break
    return outcome


def _header(
    spec: Spec, profile: ModelProfile, profile_duration_s: float, about: Mapping[str, Any]
) -> Header:
    return Header(
        name=spec.name,
        command=f"{PROGRAM.name} --model {spec.model} --side {spec.side}",
        ds_config=spec.ds_config,
        slots=spec.slots,
        slot_memory_bytes=spec.slot_memory_bytes,
        profile=profile,
        profile_duration_s=profile_duration_s,
        about={
            **about,
            "passes": spec.passes,
            "measured steps": f"{spec.steps[1] - spec.steps[0] + 1} to {spec.steps[2]}",
        },
        switches=spec.switches,
    )


def _check_same(spec: Spec, journal: Journal) -> None:
    """Refuses to go on with a recording of another program, configuration or grid.

    Raises:
        SystemExit: it is one.
    """
    if not journal.events:
        return
    begun = Header.from_json(journal.events[0])
    same = begun == _header(spec, begun.profile, begun.profile_duration_s, begun.about)
    rows = map(Row.from_json, journal.events[1:])
    if not same or any(row.settings not in spec.settings for row in rows):
        raise SystemExit(
            f"{spec.name} was begun with other settings; delete {journal.path} to begin anew"
        )


def _refuse(outcome: Outcome, what: str) -> None:
    if outcome.kind not in (OutcomeKind.OK, OutcomeKind.OOM):
        raise SystemExit(
            f"{what}: {outcome.kind.value}: {outcome.message}\n{outcome.detail}\n"
            "Run the command again to go on."
        )


def _trial(
    spec: Spec, number: int, kind: TrialKind, settings: Mapping[str, Any], size: int
) -> Trial:
    batch = BatchTriple(size * spec.slots, size, 1)
    return Trial(
        number,
        kind,
        f"t{number}",
        int(settings.get("stage", 0)),
        batch,
        overrides_for(settings, batch),
        script_args=script_args_for(settings),
    )


def _engine(spec: Spec, machine: Machine, folder: Path) -> LocalEngine:
    model_dir = folder / "model"
    model_dir.mkdir()
    shutil.copy(PROGRAM, model_dir)
    (folder / "ds_config.json").write_text(json.dumps(spec.ds_config))
    command = ["python3", PROGRAM.name, "--model", spec.model, "--side", str(spec.side)]
    command += ["--steps", "1000", f"--{CHECKPOINTING}", "False"]
    command += ["--deepspeed", "--deepspeed_config"]
    command.append(str(folder / "ds_config.json"))
    user = experiment.of_command(command, spec.name, model_dir, folder / "ds_config.json")
    options = TrialOptions(
        timeout_s=600.0,
        slot_memory_bytes=spec.slot_memory_bytes,
        start_step=spec.steps[0],
        end_step=spec.steps[1],
        max_steps=spec.steps[2],
    )
    program = entrypoint.parse(user.entrypoint, model_dir)
    hosts = [Host(machine)]
    return LocalEngine(
        user, program, hosts, folder, LocalOptions(options), slots_per_trial=spec.slots
    )


def about_machine(machine: Machine) -> dict[str, str]:
    """Where and when something is measured, and with what."""
    return {
        "machine": machine.describe(),
        "host": f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / GIB:.0f} GiB",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in VERSIONS},
    }


def _estimate(spec: Spec, concurrent: int) -> str:
    trials = (8 + 6 * (spec.passes - 1)) * len(spec.settings)
    seconds = spec.seconds_per_trial * trials / concurrent
    return (
        f"{spec.name}: {len(spec.settings)} settings, passes: {spec.passes}, about {trials} "
        f"trials, {duration(seconds)} with {concurrent} at once"
    )


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--passes",
        type=int,
        choices=range(1, 100),
        metavar="N",
        help="how often each trial that runs is measured; the table has the median (default: "
        f"{' or '.join(map(str, sorted({spec.passes for spec in SPECS})))}, see --list)",
    )
    parser.add_argument("--list", action="store_true", help="say what there is, record nothing")
    parser.add_argument("--concurrent", type=int, default=1, metavar="N", help="trials at once")
    parser.add_argument("--data", type=Path, default=tables.DATA, metavar="DIR")
    args = parser.parse_args(None if argv is None else list(argv))
    unknown = set(args.names) - {spec.name for spec in SPECS}
    if unknown:
        parser.error(f"no such table: {', '.join(sorted(unknown))}; --list tells which there are")
    machine = find_machine()
    specs = [s for s in SPECS if s.name in args.names or not args.names]
    if not args.names:
        specs = [s for s in specs if args.list or s.accelerator == machine.accelerator]
    if args.passes is not None:
        specs = [replace(spec, passes=args.passes) for spec in specs]
    for spec in specs:
        if args.list:
            print(_estimate(spec, args.concurrent))
        elif spec.accelerator != machine.accelerator:
            sys.exit(f"{spec.name} is for {spec.accelerator}, and this is {machine.describe()}")
        else:
            finish(spec, machine, args.data, concurrent=args.concurrent)


if __name__ == "__main__":
    main()
