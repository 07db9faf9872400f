"""A run as a file that may be given away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testing.scenarios import User
from testing.world import Failure, Finding, World

PRIVATE = "alice-of-acme"


@pytest.mark.usefixtures("unchecked_configurations")
def test_a_shared_run_has_measurements_and_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    failure = Failure("ERROR", {"stage": 3}, PRIVATE, PRIVATE)
    user = User(tmp_path / PRIVATE, World(failures=(failure,), findings=(Finding({}, (PRIVATE,)),)))
    user.has(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": f"{PRIVATE}/adam", "params": {"lr": 0.5}},
            "tensorboard": {"output_path": f"/home/{PRIVATE}"},
        },
        name=PRIVATE,
    )
    told = user.tunes("--max-trials", 12, method="random", experiment=True)
    assert user.types("export", "run", "--share", "shared.json").status == 0
    text = (user.folder / "shared.json").read_text()
    shared = json.loads(text)
    assert PRIVATE not in text and "/home" not in text and 'lr"' not in text
    assert len(shared["trials"]) == len(told.trials)
    best = shared["trials"][shared["best"]]
    assert best["metrics"]["throughput"] == told.best["metrics"]["throughput"]
    assert user.types("export", "run", "--share", "shared.json").status == 2, "it is there"
    assert user.types("import", "shared.json").status == 0
    for change in ({"schema": "other"}, {"version": 99}, {"best": 10**6}, {"metric": 3}):
        (user.folder / "other.json").write_text(json.dumps({**shared, **change}))
        assert user.types("import", "other.json").status == 2
