"""Whom the message blames if no configuration of a run works."""

from __future__ import annotations

import pytest

from testing.scenarios import User
from testing.world import Failure, World

OOM = Failure("OOM", {"kind": "baseline"}, "out of memory")
INSIDE_DSAT = "an error in dsat, not in your script: KeyError"


@pytest.mark.parametrize(
    ("failures", "words"),
    [
        (
            (Failure("ERROR", {}, "rank 0: ValueError", "Traceback"),),
            "your own configuration failed: rank 0: ValueError script's own error trials/baseline",
        ),
        (
            (OOM, Failure("ERROR", {}, "rank 0: ValueError", "Traceback", before_engine=True)),
            "script's own error",
        ),
        (
            (OOM, Failure("ERROR", {}, "rank 0: ValueError", "Traceback")),
            "z2_offload micro batch 1",
        ),
        ((Failure("ERROR", {}, INSIDE_DSAT, "Traceback"),), "a bug of dsat"),
        # For example a lost host: the script reported nothing.
        ((Failure("ERROR", {}, "node-3 is lost: its supervisor has ended"),), "node-3 lost"),
    ],
)
def test_only_what_the_script_itself_did_is_its_own(
    user: User, failures: tuple[Failure, ...], words: str
) -> None:
    user.world = World(failures=failures)
    told = user.tunes("--max-trials", 6, method="random")
    line = told.err.splitlines()[-1]
    assert told.status == 1 and [word for word in words.split() if word not in line] == []
    assert ("own error" in line) is ("own error" in words)
    assert ("Traceback" in told.err) is bool(failures[-1].detail), "of the script"
    assert told.json["best"] is None and told.json["best_ds_config"] is None


def test_a_model_of_which_anything_ran_is_not_said_to_be_too_large(user: User) -> None:
    """Only the profile trial fits, with another batch."""
    failures = (OOM, Failure("OOM", {"kind": "search"}, "out of memory"))
    user.world = World(failures=failures)
    user.has({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8})
    told = user.tunes("--max-trials", 6, method="random")
    line = told.err.splitlines()[-1]
    assert told.status == 1 and "profile_" in line and "does not fit" not in line
