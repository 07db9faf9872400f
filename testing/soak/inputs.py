"""Mutated configurations, experiments and command lines: a line and a status, no traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from dsat.app import estimate, local
from dsat.cli import main, output
from dsat.engines.places import local as this_machine
from dsat.inputs.option import options_of
from dsat.inputs.settings import Settings
from dsat.search import SEARCHES
from testing.helpers import World
from testing.local import PROGRAMS, cpu_machine
from testing.simulated import SimulatedEngine
from testing.soak import Hang, Tally, at_most, mutations

LIMIT_S = 20.0
_METHODS = ("model", "asha", "binary", "random", "gridsearch")
# More settings than any single example has, so that there is something to damage.
_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": [1, 2, 3],
        "reduce_bucket_size": [500000, 5e8],
        "overlap_comm": True,
        "offload_optimizer": {"device": ["none", "cpu"], "pin_memory": [True, False]},
        "offload_param": {"device": "nvme", "nvme_path": "/tmp/swap", "buffer_count": 5},
    },
    "activation_checkpointing": {"partition_activations": False},
    "autotuning": {
        "enabled": True,
        "fast": False,
        "metric": "throughput",
        "tuner_type": "gridsearch",
        "tuner_num_trials": 10,
        "max_train_batch_size": 512,
        "num_gpus": [2],
        "results_dir": "results",
        "exps_dir": "exps",
        "overwrite": True,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
    },
}


def attack(seed: int, count: int) -> Tally:
    """Mutated inputs in a folder of their own, in this process; nothing is run of them."""
    rng, tally = random.Random(seed), Tally()
    with a_folder() as folder:
        experiment = yaml.safe_load((folder / "deepspeed.yaml").read_text())
        for number in range(count):
            argv = _write(rng, folder, experiment)
            ending, finding = run(argv)
            tally.note(ending, f"{seed}/{number}: {argv} {finding}" if finding else "")
    return tally


def searches(seed: int, count: int) -> Tally:
    """Search with mutated inputs that a dry run accepts and made-up trials, and show the runs."""
    rng, tally = random.Random(seed), Tally()
    with a_folder() as folder, mock.patch.dict(local.ENGINES, {"local": _made_up}):
        experiment = yaml.safe_load((folder / "deepspeed.yaml").read_text())
        while tally.tried < count:
            dry = _write(rng, folder, experiment)
            if run(dry)[0] != "status 0":
                continue
            place = dry.index("--dry-run")
            runs = ["-mt", "9", "-m", "throughput", "--engine", "local"]
            runs += ["--run-dir", f"run-{tally.tried}"]
            argv = [*dry[:place], *runs, *dry[place + 1 :]]
            ending, finding = run(argv)
            if not finding and Path(runs[-1]).is_dir():
                ending = f"{ending}, {run(['show', runs[-1]])[0]}"
                finding = run(["show", "--trials", "--json", runs[-1]])[1]
            tally.note(ending, f"{seed}/{tally.tried}: {argv} {finding}" if finding else "")
    return tally


def _made_up(ready: Any, folder: Path) -> SimulatedEngine:
    """Engine whose trials come to what a world of the tests makes of them."""
    slots = ready.plan.slots_per_trial
    return SimulatedEngine(World().outcome, num_slots=max(2, slots), slots_per_trial=slots)


def run(argv: Sequence[str]) -> tuple[str, str]:
    """Run a command line; return its end and what is wrong with it."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with at_most(LIMIT_S), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status: Any = main.main(argv)
    except SystemExit as stop:
        status = stop.code
    except Hang:
        return "hang", f"took longer than {LIMIT_S:g} s"
    except Exception as error:
        return "traceback", f"raised {error!r}"
    said = err.getvalue()
    if status not in (0, 1, 2):
        return "bug", said[-400:]
    if "Traceback" in said or (status and "error: " not in said):
        return "no message", said[-400:]
    if len(said) > 20_000:
        return "a flood", f"{len(said)} characters"
    return f"status {status}", ""


def _raised(error: Exception) -> int:
    raise error


@contextlib.contextmanager
def a_folder() -> Iterator[Path]:
    before = Path.cwd()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsat-soak-")))
        for path in (PROGRAMS / "tiny").iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        for module in (local, estimate):
            stack.enter_context(mock.patch.object(module, "LocalEngine", _NoEngine))
        stack.enter_context(
            mock.patch.object(this_machine, "find_machine", return_value=cpu_machine(2))
        )
        stack.enter_context(mock.patch.object(output, "report_bug", _raised))
        os.chdir(folder)
        stack.callback(os.chdir, before)
        yield folder


class _NoEngine:
    """In the place of an engine that would run trials."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("trials would be run")


def _write(rng: random.Random, folder: Path, experiment: dict[str, Any]) -> list[str]:
    """Damages one of the inputs; the command line that reads it."""
    damaged = rng.choice(("config", "config", "experiment", "argv"))
    config = json.dumps(_CONFIG).encode()
    if damaged == "config":
        config = _damaged(rng, _CONFIG, json.dumps(_CONFIG, indent=1))
    (folder / "ds_config.json").write_bytes(config)
    inline = rng.random() < 0.3
    if inline:
        hparams = {**experiment["hyperparameters"], "deepspeed_config": _CONFIG}
        experiment = {**experiment, "hyperparameters": hparams}
    text = yaml.safe_dump(experiment).encode()
    if damaged == "experiment":
        text = _damaged(rng, experiment, yaml.safe_dump(experiment))
    (folder / "deepspeed.yaml").write_bytes(text)
    script = ["train.py", "--deepspeed_config", "ds_config.json", "--batch", "4"]
    method = rng.choice(_METHODS)
    options = _options(rng, method) if damaged == "argv" else []
    if damaged != "experiment" and rng.random() < 0.3:
        return ["tune", "--dry-run", *script]
    if damaged == "experiment" or rng.random() < 0.5:
        return [method, *options, "--dry-run", "deepspeed.yaml", "."]
    return [method, *options, "--dry-run", "--", *script]


def _damaged(rng: random.Random, document: Any, text: str) -> bytes:
    if rng.random() < 0.4:
        return mutations.of_text(rng, text)
    return json.dumps(mutations.of_values(rng, document)).encode()


def _options(rng: random.Random, method: str) -> list[str]:
    """Up to four options with values that they may not be prepared for."""
    known = [*options_of(Settings), *SEARCHES[method].options.values()]
    words: list[str] = []
    for _ in range(rng.randrange(1, 5)):
        own = rng.choice(known)
        if own.name in ("engine", "detach"):
            continue
        words.append(rng.choice(own.flags))
        if own.kind is not None:
            words += [_value(rng, own.choices) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    return words


def _value(rng: random.Random, choices: Sequence[Any] | None) -> str:
    numbers = ("0", "-1", "1", "7", "12", "1" + "0" * 18, "9" * 400, "9" * 5000, "1e308", "nan")
    words = ("", "inf", "2%", "½", "٣", "²", "24GiB", "9" * 300 + "GiB", "90s", "a=b", "=", "all")
    paths = (".", "nowhere", "/dev/zero", "train.py", "\udcff", "a" * 5000, "--", "\x1b[2J")
    if choices and rng.random() < 0.4:
        return str(rng.choice(list(choices)))
    return rng.choice((*numbers, *words, *paths))
