"""Trials change nothing in the user's folder; the full-length run saves as the script says."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsat.in_trial import side_effects
from testing.command import FAST, typed
from testing.local import PROGRAMS


def snapshot(folder: Path) -> dict[str, str]:
    """Digest of each file in a folder, the run's left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {"run", "__pycache__"} & {*path.relative_to(folder).parts}
    }


@pytest.mark.slow
def test_a_search_leaves_checkpoints_and_trackers_alone(tmp_path: Path) -> None:
    folder = tmp_path / "saves"
    shutil.copytree(PROGRAMS / "saves", folder)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("global_step9999")
    resumed = folder / "resumed" / "epoch3"
    resumed.mkdir(parents=True)
    (resumed.parent / "latest").write_text(resumed.name)
    weights = {"2.bias": torch.full((1,), torch.nan)}
    torch.save(
        {"module": weights, "global_steps": 12, "epoch": 3},
        resumed / "zero_pp_rank_0_mp_rank_00_model_states.pt",
    )
    for name in ("last.pth.tar", "older.pt"):
        (folder / name).write_bytes(b"of an earlier training")
    (folder / "link.ckpt").symlink_to("older.pt")
    before = snapshot(folder)
    words = "model --max-trials 3 --run-dir run --slots 1 -m throughput --max-micro-batch 8".split()
    script = "train.py --deepspeed --deepspeed_config ds_config.json".split()
    told = typed(folder, *words, *FAST, "--finals", "0", "--", *script)
    assert told.status == 0, told
    assert snapshot(folder) == before
    best = json.loads((folder / "run" / "best_ds_config.json").read_text())
    assert best["tensorboard"]["enabled"], "the result keeps what the user switched on"
    logs = [path.read_text() for path in (folder / "run").rglob("stderr.log")]
    assert any("save_checkpoint did nothing" in log for log in logs)


class Fixed:
    """Arguments with a configuration that cannot be set."""

    def __init__(self, path: Path) -> None:
        self.path, self.local_rank = path, -1

    @property
    def deepspeed_config(self) -> str:
        return str(self.path)


def test_reports_are_switched_off_and_nothing_else(tmp_path: Path) -> None:
    own = {"zero_optimization": {"stage": 1}, "wandb": {"enabled": True, "project": "mine"}}
    quiet = {
        "zero_optimization": {"stage": 1},
        "wandb": {"enabled": False, "project": "mine"},
        "wall_clock_breakdown": False,
    }
    arguments: dict[str, Any] = {"config": {**own, "wall_clock_breakdown": True}}
    side_effects._without_reports(arguments)
    assert arguments["config"] == quiet
    path = tmp_path / "ds_config.json"
    args = Fixed(path)
    for content in (quiet, {**own, "wall_clock_breakdown": True}):
        path.write_text(json.dumps(content))
        arguments = {"args": args}
        side_effects._without_reports(arguments)
        if content is quiet:
            assert arguments == {"args": args}, "DeepSpeed itself reads it, and refuses no argument"
    assert arguments["config"] == quiet and arguments["args"].deepspeed_config is None
    arguments["args"].local_rank = 0  # as DeepSpeed writes it
    assert args.local_rank == 0 and args.deepspeed_config == str(path)
