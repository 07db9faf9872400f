"""Mutated configurations, experiments and command lines: dsat must answer with one line.

It must also return a status, and print no traceback.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from dsat.cli import output
from dsat.options import options_of
from dsat.search import SEARCHES
from dsat.tuning.settings import Settings
from testing.scenarios import User
from testing.soak import METHODS, Hang, Tally, at_most, complaint, mutations
from testing.world import World

LIMIT_S = 60.0
WORLD = World(slots=2)
# Many more settings than any example has, so that there is much to damage.
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
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch-size"},
    },
}


def attack(seed: int, count: int) -> Tally:
    """Check mutated inputs with dry runs, which start nothing."""
    rng, tally = random.Random(seed), Tally()
    with a_user() as (user, experiment):
        for number in range(count):
            argv = _write(rng, user.folder, experiment)
            ending, finding = run(user, argv)
            tally.note(ending, finding and f"{seed}/{number}: {argv} {finding}")
    return tally


def searches(seed: int, count: int) -> Tally:
    """Search with mutated inputs that a dry run accepts, and show the runs."""
    rng, tally = random.Random(seed), Tally()
    with a_user() as (user, experiment):
        while tally.tried < count:
            dry = _write(rng, user.folder, experiment)
            if run(user, dry)[0] != "status 0":
                continue
            place, name = dry.index("--dry-run"), f"run-{tally.tried}"
            options = ["-mt", "9", "-m", "throughput", "--engine", "local", "--run-dir", name]
            argv = [*dry[:place], *options, *dry[place + 1 :]]
            ending, finding = run(user, argv)
            if not finding and (user.folder / name).is_dir():
                shown, finding = run(user, ["show", "--trials", "--json", name])
                ending = f"{ending}, {shown}"
            tally.note(ending, finding and f"{seed}/{tally.tried}: {argv} {finding}")
    return tally


def run(user: User, argv: Sequence[str]) -> tuple[str, str]:
    """Run a command line; return how it ended, and what is wrong with that."""
    try:
        with at_most(LIMIT_S):
            told = user.types(*argv)
    except Hang:
        return "hang", f"took longer than {LIMIT_S:g} s"
    except Exception as error:
        return "traceback", f"raised {error!r}"
    finding = complaint(told)
    return "bug" if finding else f"status {told.status}", finding


def _raise(error: Exception) -> int:
    raise error


@contextlib.contextmanager
def a_user(world: World = WORLD) -> Iterator[tuple[User, dict[str, Any]]]:
    """Yield a user in a new folder, and their experiment's configuration.

    An error that the command line would report as a bug of dsat is raised here.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dsat-soak-") as folder,
        mock.patch.object(output, "report_bug", _raise),
    ):
        user = User(Path(folder), world)
        user.has()
        yield user, yaml.safe_load((user.folder / "deepspeed.yaml").read_text())


def _write(rng: random.Random, folder: Path, experiment: dict[str, Any]) -> list[str]:
    """Write the inputs with one of them damaged; return the command line that reads them."""
    damaged = rng.choice(("config", "config", "experiment", "argv"))
    config = json.dumps(_CONFIG).encode()
    if damaged == "config":
        config = _damaged(rng, _CONFIG, json.dumps(_CONFIG, indent=1))
    (folder / "ds.json").write_bytes(config)
    inline = rng.random() < 0.3
    if inline:
        hparams = {**experiment["hyperparameters"], "deepspeed_config": _CONFIG}
        experiment = {**experiment, "hyperparameters": hparams}
    text = yaml.safe_dump(experiment).encode()
    if damaged == "experiment":
        text = _damaged(rng, experiment, yaml.safe_dump(experiment))
    (folder / "deepspeed.yaml").write_bytes(text)
    script = ["train.py", "--deepspeed_config", "ds.json", "--batch-size", "4"]
    method = rng.choice(METHODS)
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
    """Return up to four options with values that they may not expect."""
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
