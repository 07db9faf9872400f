"""Predicted against allocated memory, for the examples and for several ranks: prints a table.

    python -m benchmarks.device_memory [NAME ...] [--null]

Targets: errors of at most 1 % in the median and 3 % at worst, and no trial out of memory.

Each script is estimated by `dsat estimate`, then searched by `random` with a limit of 2 GiB per
slot. With --null, devices count their memory but compute nothing (`testing/null_cuda`): torch's
allocator and DeepSpeed are real, but the memory that kernels need is missing. The table shows
errors relative to the peak of allocated memory:

- predicted: errors of the search, which learns from earlier trials, at least from the profile. The
  targets apply to these.
- simulated: errors of the simulations alone.
- reserved at most: memory that the allocator reserves in addition.

Searches of so few trials stay in stage 0, except those with few samples. These begin far below the
simulated micro batch, so the closed form predicts the difference. The exit status is 1 if a command
failed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common, searching
from benchmarks.common import ROOT
from dsat.memory.predictor import MemoryModel
from dsat.run.run import Run
from dsat.values.outcome import OutcomeKind
from testing.null_cuda import Device, NullCuda, build

_EXAMPLES = ROOT / "examples"
_LIMIT_S = 900.0
# Largest allowed errors of predictions, relative to allocated memory.
MEDIAN, WORST = 0.01, 0.03
_SEARCH = (
    "--max-trials 7 --finals 0 --slot-memory 2GiB --zero-stages 0 1 2 3 --random-seed 1 "
    "--max-concurrent-trials 1 --start-profile-step 2 --end-profile-step 3 --max-profile-steps 3"
).split()


@dataclass(frozen=True)
class Script:
    """A script to search.

    Attributes:
        folder: folder of the example.
        words: its command line, or only the experiment's configuration file.
        slots: ranks of a trial.
        options: further options of the search.
    """

    folder: str
    words: tuple[str, ...]
    slots: int
    options: tuple[str, ...] = ()

    def command(self, *method: str) -> list[str]:
        """Return the command `dsat METHOD` for this script."""
        is_command = len(self.words) > 1
        target = ["--", *self.words] if is_command else [*self.words, "."]
        first, *options = method
        words = [first, *options, *target] if is_command else [first, *target, *options]
        return [sys.executable, "-m", "dsat", *words]


def _few_samples(stage: int) -> tuple[str, ...]:
    """Return options of a search that begins far below the simulated micro batch."""
    return "--zero-stages", str(stage), "--max-trials", "4"


_PLAIN = tuple("python3 train.py --deepspeed --deepspeed_config ds_config.json".split())
_TRAINER = (
    *"python3 train.py --deepspeed ds_config.json --per_device_train_batch_size 4".split(),
    *("--gradient_checkpointing", "False"),
    *("--output_dir", str(Path(tempfile.gettempdir(), "dsat-trainer"))),
)
SCRIPTS: Mapping[str, Script] = {
    "plain": Script("plain", _PLAIN, 1),
    "hf_trainer": Script("hf_trainer", _TRAINER, 1),
    "core_api": Script("core_api", ("deepspeed.yaml",), 1),
    "deepspeed_trial": Script("deepspeed_trial", ("deepspeed.yaml",), 1),
    "plain, 2 ranks": Script("plain", _PLAIN, 2),
    "plain, 8 ranks": Script("plain", _PLAIN, 8),
    "plain, few samples in stage 2": Script("plain", _PLAIN, 1, _few_samples(2)),
    "plain, few samples in stage 3": Script("plain", _PLAIN, 1, _few_samples(3)),
    "plain, 8 ranks, few samples in stage 3": Script("plain", _PLAIN, 8, _few_samples(3)),
}


@dataclass(frozen=True)
class Errors:
    """Errors of memory predictions for a trial, relative to the memory that it allocated.

    Attributes:
        predicted: error of the search's prediction.
        simulated: error of the simulations alone.
        reserved: memory that the allocator reserved in addition.
    """

    predicted: float
    simulated: float
    reserved: float


def of_run(run: Run) -> dict[int, Errors]:
    """Return the errors by trial id, for trials that ran and have a prediction."""
    assert run.memory_basis is not None and run.profile is not None
    model = MemoryModel(
        run.memory_basis,
        slots=run.plan.slots_per_trial,
        limit_bytes=run.profile.slot_memory_bytes,
        on_device=True,
    )
    found = {}
    for trial in run.trials.values():
        memory = run.outcomes[trial.id].memory
        if trial.predicted_bytes is None or memory is None:
            continue
        allocated = max(memory.allocated_bytes.values())
        shape = model.shape(run.plan.config(trial.overrides), trial.script_args)
        simulated = model.predicted_bytes(shape, trial.batch.micro_batch)
        sizes = trial.predicted_bytes, simulated, max(memory.reserved_bytes.values())
        found[trial.id] = Errors(*(size / allocated - 1 for size in sizes))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--null", action="store_true", help="on a CUDA without a device")
    arguments = parser.parse_args(argv)
    common.choose(arguments.names, list(SCRIPTS), parser)
    common.print_explanation(__doc__)
    common.print_head(
        *("script", "estimate", "trials", "out of memory", "predicted: median, worst"),
        *("simulated: median, worst", "reserved at most", ""),
    )
    ended_well = True
    with tempfile.TemporaryDirectory() as name:
        for script in arguments.names or SCRIPTS:
            folder = Path(tempfile.mkdtemp(dir=name))
            ended_well &= _compare(script, folder, null=arguments.null)
    return 0 if ended_well else 1


def _compare(name: str, folder: Path, *, null: bool) -> bool:
    """Print the row of a script; return whether both commands succeeded."""
    script, env, run_dir = SCRIPTS[name], {"XDG_CACHE_HOME": str(folder)}, folder / "run"
    if null:
        libraries = build(ROOT / ".cache" / "null_cuda")
        env |= NullCuda(libraries, folder / "books", [Device()] * script.slots).environment()
    slots = ["--devices", str(script.slots)]
    estimated = _ends_well(script.command("estimate", *slots), script, env)
    said = "ends well" if estimated else "failed"
    options = [*slots, "--run-dir", str(run_dir), *_SEARCH, *script.options]
    if not _ends_well(script.command("random", *options), script, env):
        common.print_row(name, said, "the search failed", "", "", "", "", "**missed**")
        return False
    run = searching.run_in(run_dir)
    found = list(of_run(run).values())
    predicted, simulated = ([getattr(e, n) for e in found] for n in ("predicted", "simulated"))
    reserved = max(each.reserved for each in found)
    lost = [o.kind for o in run.outcomes.values()].count(OutcomeKind.OOM)
    met = "met" if estimated and not lost and _is_met(predicted) else "**missed**"
    errors_of = _errors(predicted), _errors(simulated)
    common.print_row(name, said, len(found), lost, *errors_of, f"{reserved:.1%} more", met)
    return estimated


def _ends_well(command: Sequence[str], script: Script, env: Mapping[str, str]) -> bool:
    variables = common.environment(**env)
    status, told, _ = common.run(command, _EXAMPLES / script.folder, variables, timeout_s=_LIMIT_S)
    if status or "by formula:" in told:
        print(told, file=sys.stderr)
        return False
    return True


def _errors(errors: Sequence[float]) -> str:
    worst = max(errors, key=abs)
    return f"{statistics.median(map(abs, errors)):.2%}, {worst:+.2%}"


def _is_met(errors: Sequence[float]) -> bool:
    sizes = [abs(error) for error in errors]
    return statistics.median(sizes) <= MEDIAN and max(sizes) <= WORST


if __name__ == "__main__":
    sys.exit(main())
