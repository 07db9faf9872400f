"""A trial and the printed command run under the same conditions."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsat.in_trial.adapters import trackers
from dsat.in_trial.loopback import INTERFACES
from dsat.in_trial.memory_limit import MALLOC_VARIABLES
from testing.command import FAST, run_of, run_to_end, typed
from testing.local import PROGRAMS, read_json
from testing.printed import printed_in

pytestmark = pytest.mark.slow

# A rank's number and meeting point, and variables that shells and launchers set for themselves.
IDENTITY = """
_ CROSS_RANK CROSS_SIZE CUDA_VISIBLE_DEVICES DET_CHIEF_IP
DSAT_OWNER DSAT_RANK_PID DSAT_RUN_DIR DSAT_TRIAL_DIR
GROUP_RANK GROUP_WORLD_SIZE HAND_DIR LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
OLDPWD PWD PYTHONPATH PYTHONUNBUFFERED RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE SHLVL USE_DEEPSPEED
WORLD_SIZE _MLFLOW_TELEMETRY_SESSION_ID
""".split()
# Variables without effect: the accelerator that is detected anyway; torch's default for failing
# NCCL calls; mallopt's variables, as trials call mallopt instead; the meeting on loopback.
SAME_WITHOUT = {
    "DS_ACCELERATOR": "cpu",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    **{name: str(value) for name, value in MALLOC_VARIABLES.items()},
    **INTERFACES,
}


@pytest.mark.parametrize(
    ("ranks", "launcher", "options"),
    [
        (1, "env OWN_SETTING='two words' torchrun --standalone --nproc-per-node=1", ""),
        pytest.param(2, "deepspeed --num_gpus 2", "--cold", marks=pytest.mark.nightly),
    ],
)
def test_a_trial_has_the_conditions_of_the_printed_command(
    tmp_path: Path, ranks: int, launcher: str, options: str
) -> None:
    folder, hand = tmp_path / "program", tmp_path / "hand"
    shutil.copytree(PROGRAMS / "conditions", folder)
    hand.mkdir()
    words = f"random --max-trials 3 --finals 0 -m throughput --run-dir run {options}".split()
    command = shlex.split(f"{launcher} train.py --deepspeed_config ds_config.json")
    told = typed(folder, *words, *FAST, "--slot-memory", "1GiB", "--", *command)
    assert told.status == 0, told
    ran = run_to_end(["bash", "-c", printed_in(folder / "run")], HAND_DIR=str(hand))
    assert ran.status == 0, ran
    _, *trials = run_of(folder / "run").trials.values()  # the first one is the command itself
    assert len(trials) == 2
    for rank in range(ranks):
        by_hand = conditions(hand, rank)
        for trial in trials:
            of_trial = conditions(folder / "run" / "trials" / trial.name, rank)
            assert differences(of_trial, by_hand) == {}, trial.name
        assert by_hand["threads"] == 1 and len(by_hand["cores"]) == min(ranks, os.cpu_count() or 1)
        assert by_hand["tensors of their own mapping"] == [False, True, True, True]


def differences(of_trial: dict[str, Any], by_hand: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (of_trial.get(name), by_hand.get(name))
        for name in {**of_trial, **by_hand}
        if of_trial.get(name) != by_hand.get(name)
    }


def conditions(folder: Path, rank: int) -> dict[str, Any]:
    """Return the conditions that a rank wrote, without those that must differ."""
    found: dict[str, Any] = read_json(folder / f"conditions{rank}.json")
    environment = {
        name: value
        for name, value in found["environment"].items()
        if name not in IDENTITY
        and not name.startswith("TORCHELASTIC_")
        and name not in (*trackers.TRACKERS_OFF, "MLFLOW_TRACKING_URI")
        and SAME_WITHOUT.get(name) != value
    }
    config = next(i for i, word in enumerate(found["arguments"]) if word.endswith(".json"))
    return {
        **environment,
        **{name: value for name, value in found.items() if name != "environment"},
        "arguments": [*found["arguments"][:config], *found["arguments"][config + 1 :]],
    }
