"""Why the ranks of a user's own command cannot be started one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from testing.first_start import TRAINS, seen, user_folder


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


# As with `srun bash -c "python train.py --rank $SLURM_PROCID"`.
EACH = """for rank in 0 1; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 {0} python3 trains.py {1} &
done; wait"""
OLD_LAUNCHER = ["python3", "-m", "torch.distributed.launch", "--nproc_per_node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "why", "script", "args", "slots"),
    [
        (["python3", "-c", TRAINS, "--steps"], "not in a file", "", ("--steps",), 1),
        nightly(["bash", "-c", "python3 - 7 < trains.py"], "not in a file", "", ("7",), 1),
        (["python3", "spawns.py", "fork"], "multiprocessing", "spawns.py", ("fork",), 2),
        nightly(["python3", "spawns.py", "spawn"], "multiprocessing", "spawns.py", ("spawn",), 2),
        (
            ["bash", "-c", EACH.format("", "--rank $rank")],
            "arguments",
            "trains.py",
            ("--rank", "0"),
            2,
        ),
        (["bash", "-c", EACH.format("A=$rank", "7")], "variables", "trains.py", ("7",), 2),
        nightly([*OLD_LAUNCHER, "trains.py", "7"], "passes --local-rank", "trains.py", ("7",), 2),
    ],
    ids=["-c", "stdin", "fork", "spawn", "arguments", "variables", "launch"],
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
