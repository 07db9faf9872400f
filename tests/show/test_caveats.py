"""What the verdict says first about a configuration that likely trains wrongly."""

from __future__ import annotations

from pathlib import Path

from dsat.run.training_check import OWN_IS_WRONG
from dsat.show.past_runs import load
from dsat.show.verdict import verdict
from testing.scenarios import User
from testing.world import Failure, Finding, World


def test_wrong_gradients_of_your_own_configuration_come_first(tmp_path: Path) -> None:
    """They come before any result on speed."""
    user = User(tmp_path, World(effects={"z1": 1.5, "z2": 1.5}))
    user.has({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4})
    user.tunes("--max-trials", 4, "--finals", 0, "-z", 1, 2, "--run-dir", "run", method="random")
    run = load(user.folder / "run").run
    assert run.best is run.baseline
    assert verdict(run).headline.startswith("Keep your configuration")
    run.disqualified[1] = f"{OWN_IS_WRONG}: trials of other strategies agree with it"
    assert verdict(run).headline.startswith("Your configuration likely computes wrong gradients")


def test_your_configuration_is_not_compared_with_itself(tmp_path: Path) -> None:
    """Nothing else was measured, and some of its steps took far longer."""
    late = Finding({"kind": "baseline"}, late=(3, 6, 9))
    others = Failure("INVALID", {"kind": "search"}, "fails")
    user = User(tmp_path, World(findings=(late,), failures=(others,)))
    user.has({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4})
    told = user.tunes("--max-trials", 2, "--finals", 0, "--run-dir", "run", method="random")
    assert told.status == 0 and "took far longer" not in told.out
