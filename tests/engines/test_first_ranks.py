"""Why the ranks of a user's own command cannot be started one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsat.command import recorded_start
from testing.first_start import TRAINS, seen, user_folder
from testing.helpers import starts_of


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return user_folder(tmp_path, monkeypatch)


def nightly(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


SPAWNS = f"""
import multiprocessing, os, sys

def train(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    {TRAINS}

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=train, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "why", "script", "args", "slots"),
    [
        (["python3", "-c", TRAINS, "--steps"], "not in a file", "", ("--steps",), 1),
        nightly(["bash", "-c", "python3 - 7 < trains.py"], "not in a file", "", ("7",), 1),
        (["python3", "spawns.py", "fork"], "multiprocessing", "spawns.py", ("fork",), 2),
        nightly(["python3", "spawns.py", "spawn"], "multiprocessing", "spawns.py", ("spawn",), 2),
    ],
    ids=["-c", "stdin", "fork", "spawn"],
)
def test_why_ranks_cannot_be_started_by_themselves(
    command: Sequence[str],
    why: str,
    script: str,
    args: tuple[str, ...],
    slots: int,
    place: Path,
) -> None:
    (place / "trains.py").write_text(TRAINS)
    (place / "spawns.py").write_text(SPAWNS)
    program = seen(place, *command)
    assert why in program.needs_command
    assert (program.script, program.args, program.slots) == (script, args, slots)
    assert program.started_by == tuple(command)


LOCAL = ({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    ("args", "variables", "why", "kept"),
    [
        # As with `srun bash -c "python train.py --rank $SLURM_PROCID"`.
        (("--rank 0", "--rank 1"), LOCAL, "different arguments", ("--rank", "0")),
        (("7", "7"), ({"A": "0"}, {"A": "1"}), "different environment variables", ("7",)),
        # As `torch.distributed.launch` does.
        (("--local-rank=0 7", "--local-rank=1 7"), LOCAL, "passes --local-rank", ("7",)),
        (("--local_rank=0 7", "--local_rank=1 7"), LOCAL, "", ("7",)),
    ],
)
def test_ranks_that_differ_are_those_of_the_command(
    args: Sequence[str],
    variables: Sequence[dict[str, str]],
    why: str,
    kept: tuple[str, ...],
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").touch()
    starts = [
        replace(start, command=(*start.command, *own.split()))
        for start, own in zip(starts_of(tmp_path, variables), args, strict=True)
    ]
    program = recorded_start.recognise_program(starts, ["bash", "run.sh"], {}, {0, 1})
    assert why in program.needs_command and bool(program.needs_command) is bool(why)
    assert (program.script, program.args, program.slots) == ("train.py", kept, 2)
