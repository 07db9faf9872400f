"""Small scripts of many frameworks under every launcher, tuned as their users would tune them.

    python -m testing.frameworks [FRAMEWORK ...] [--launchers NAME ...] [--ranks N ...]

`make frameworks` first installs TRL, PEFT and datasets beside the environment: transformers imports
them where it finds them. LLaMA-Factory and Axolotl are installed with versions of their own, as
`testing.own_commands` has them. Prints a row of a table for each framework; ends with 1 if one of
them was not tuned.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsat.values.outcome import OutcomeKind
from testing import own_commands, slurm
from testing.command import run_of
from testing.local import PROGRAMS

FOLDER = PROGRAMS / "frameworks"
_PACKAGES = Path(sys.prefix) / "frameworks"
_OPTIONS = "--max-trials 4 --finals 0 --memory-model formula -m throughput --zero-stages 1 2"
_OPTIONS += " --max-micro-batch 8 --end-profile-step 4 --run-dir run"
_TRAINER = "--output_dir out --use_cpu --report_to none --save_strategy no --max_steps 1000"
_TRAINER += " --per_device_train_batch_size 2"

_SHORT = "--num_generations 2 --max_completion_length 8"


@dataclass(frozen=True)
class Framework:
    """A script, the flags that it is started with, and those that name DeepSpeed's configuration.

    Attributes:
        script: in the folder, or in that of the framework's packages.
        config: flags of launchers that give none themselves; None if the script takes none.
        options: of dsat, beyond those of all.
        command: the framework's own, in place of `python`.
    """

    script: str
    flags: str
    config: str | None
    options: str = ""
    command: str = ""


FRAMEWORKS: Mapping[str, Framework] = {
    "plain loop": Framework("plain.py", "", "--deepspeed --deepspeed_config ds.json"),
    "torch.compile": Framework("plain.py", "--compile", "--deepspeed --deepspeed_config ds.json"),
    "accelerate loop": Framework("loop.py", "--per_device_train_batch_size 2", None),
    "HF Trainer": Framework("trainer.py", _TRAINER, "--deepspeed auto.json"),
    "PEFT LoRA": Framework("trainer.py", f"{_TRAINER} --lora", "--deepspeed auto.json"),
    "TRL SFT": Framework("sft.py", _TRAINER, "--deepspeed auto.json"),
    "TRL DPO": Framework("dpo.py", _TRAINER, "--deepspeed auto.json"),
    "TRL GRPO": Framework(
        "grpo.py", f"{_TRAINER} {_SHORT}", "--deepspeed auto.json", options="--divisible-by 2"
    ),
    "Lightning": Framework(
        "on_lightning.py",
        "--batch-size 2",
        "",
        options="--arg-mapping train_micro_batch_size_per_gpu=--batch-size",
    ),
    "LLaMA-Factory": Framework(
        "llamafactory/launcher.py",
        "llamafactory.yaml",
        "",
        command="FORCE_TORCHRUN=1 NPROC_PER_NODE={ranks} llamafactory-cli train llamafactory.yaml",
    ),
    "Axolotl": Framework(
        "axolotl/cli/train.py",
        "axolotl.yaml",
        "",
        command="axolotl train axolotl.yaml --launcher torchrun -- --nproc_per_node={ranks}",
    ),
}


def _launched(words: str) -> Callable[[Framework, int], str]:
    return lambda program, ranks: (
        f"{words.format(ranks=ranks)} {program.script} {program.flags} {program.config}"
    )


def _accelerate(config: str) -> Callable[[Framework, int], str]:
    launch = f"accelerate launch --config_file {config} --num_processes"
    return lambda program, ranks: f"{launch} {ranks} {program.script} {program.flags}"


SRUN = "srun"  # in a job of Slurm's own daemons, if they are installed

# Launcher -> the command line of a framework with some ranks.
LAUNCHERS: Mapping[str, Callable[[Framework, int], str]] = {
    "python": _launched("python"),
    "deepspeed": _launched("deepspeed --num_gpus {ranks}"),
    "torchrun": _launched("torchrun --standalone --nproc_per_node {ranks}"),
    "accelerate's plugin": _accelerate("plugin.yaml"),
    "accelerate with a file": _accelerate("file.yaml"),
    "bash run.sh": _launched("torchrun --standalone --nproc_per_node {ranks}"),
    SRUN: _launched("srun --overcommit --ntasks {ranks} bash rank.sh"),
}


def exists(framework: str, launcher: str, ranks: int) -> bool:
    """Tell if anybody starts such a script so, and it can train on processor cores."""
    by_accelerate = launcher.startswith("accelerate")
    if FRAMEWORKS[framework].command:
        # Their files name a DeepSpeed configuration, which accelerate refuses beside its plugin's.
        # LLaMA-Factory's has to be the first argument, where `deepspeed` puts its own, and Axolotl
        # asks CUDA for its devices where there are two.
        is_refused = launcher == "accelerate's plugin"
        is_refused |= framework == "LLaMA-Factory" and launcher == "deepspeed"
        return not is_refused and (framework != "Axolotl" or ranks == 1)
    if FRAMEWORKS[framework].config is None:
        return by_accelerate
    own = FRAMEWORKS[framework].script in ("plain.py", "on_lightning.py")
    # Lightning's ranks have devices of different numbers, which torch's processor has not.
    alone = launcher == "python" or framework == "Lightning"
    return not (by_accelerate and own) and (not alone or ranks == 1)


def tuned(framework: str, launcher: str, ranks: int, job: Mapping[str, str]) -> str:
    """Search for a script's configuration in a copy of its folder.

    Args:
        job: variables of a job of Slurm's.

    Returns:
        "tuned" or what went wrong.
    """
    program, packages = FRAMEWORKS[framework], _PACKAGES
    if framework in own_commands.FRAMEWORKS:
        packages = own_commands.install(own_commands.FRAMEWORKS[framework], framework)
        program = replace(program, script=str(packages / program.script))
    line = LAUNCHERS[launcher](program, ranks)
    if launcher == "python" and program.command:
        line = program.command.format(ranks=ranks)
    command = shlex.split(line)
    options = f"{_OPTIONS} {program.options}".split()
    with tempfile.TemporaryDirectory(prefix="dsat-frameworks-") as above:
        folder = Path(above) / "work"
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(FOLDER, folder, ignore=without)
        if packages != _PACKAGES:
            shutil.copytree(own_commands.FOLDER, folder, ignore=without, dirs_exist_ok=True)
            make = [sys.executable, "make.py"]
            subprocess.run(make, cwd=folder, check=True, capture_output=True)
        if launcher == "bash run.sh":
            (folder / "run.sh").write_text(f"set -e\n{' '.join(command)}\n")
            command = ["bash", "run.sh"]
        given = {**os.environ, **(job if launcher == SRUN else {})}
        told = subprocess.run(
            [sys.executable, "-m", "dsat", "model", *options, "--", *command],
            cwd=folder,
            env=own_commands.environment(packages, given),
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        if told.returncode:
            return f"status {told.returncode}: {told.stderr.strip()[-600:]}"
        run = run_of(folder / "run")
        lost = [
            f"{trial.name}: {run.outcomes[trial.id].message}"
            for trial in run.trials.values()
            if run.outcomes[trial.id].kind is not OutcomeKind.OK
        ]
        if lost:
            return f"{len(lost)} of {len(run.trials)} trials were lost: {lost[0]}"
        batches = {trial.batch for trial in run.trials.values()}
        return "tuned" if len(batches) > 1 else f"{len(run.trials)} trials of the same batch"


def main() -> int:
    """Print the table; 1 if something was not tuned."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("frameworks", nargs="*", default=list(FRAMEWORKS))
    here = [name for name in LAUNCHERS if name != SRUN or not slurm.missing()]
    parser.add_argument("--launchers", nargs="*", default=here, choices=LAUNCHERS)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        job: Mapping[str, str] = {}
        if SRUN in given.launchers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cluster = stack.enter_context(slurm.running(folder, 1, cpus=max(given.ranks)))
            job = stack.enter_context(cluster.allocation(1, "--exclusive"))
        return _table(given.frameworks, given.launchers, given.ranks, job)


def _table(
    frameworks: Sequence[str],
    launchers: Sequence[str],
    numbers: Sequence[int],
    job: Mapping[str, str],
) -> int:
    head = ["framework", *(f"{name}, {n}" for name in launchers for n in numbers)]
    rows = [_line(head), _line(["---"] * len(head))]
    notes: list[str] = []
    for framework in frameworks:
        cells = [framework]
        for launcher, ranks in itertools.product(launchers, numbers):
            if not exists(framework, launcher, ranks):
                cells.append("-")
                continue
            began = time.monotonic()
            found = tuned(framework, launcher, ranks, job)
            what = f"{framework}, {launcher}, {ranks} ranks"
            print(f"{what}: {found} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
            cells.append(found if found == "tuned" else f"see {len(notes) + 1}")
            if found != "tuned":
                notes.append(f"{len(notes) + 1}. {what}: {found}")
        rows.append(_line(cells))
    print(*rows, *notes, sep="\n")
    return int(bool(notes))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
