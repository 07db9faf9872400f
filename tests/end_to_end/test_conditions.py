"""What a trial runs under is what the printed command runs under when a person types it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.app.local import local_engine
from dsat.app.prepare import Prepared
from dsat.in_trial import side_effects
from dsat.in_trial.loopback import INTERFACES
from dsat.in_trial.memory_limit import MALLOC_VARIABLES
from dsat.values.trial import Trial
from testing.local import PATIENCE_S, PROGRAMS, read_json
from testing.printed import own_configuration, prepared, printed_line

pytestmark = pytest.mark.slow

# Who a rank is and where it meets the others, and what shells and launchers say of themselves.
IDENTITY = """
_ CROSS_RANK CROSS_SIZE CUDA_VISIBLE_DEVICES DET_CHIEF_IP DSAT_TRIAL_DIR GROUP_RANK
GROUP_WORLD_SIZE HAND_DIR LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OLDPWD PWD
PYTHONPATH PYTHONUNBUFFERED RANK ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE SHLVL USE_DEEPSPEED WORLD_SIZE
_MLFLOW_TELEMETRY_SESSION_ID
""".split()
# The accelerator that is found without it as well; that a call of NCCL may fail, as torch has it by
# default; mallopt's variables, in whose place trials call mallopt; and that ranks meet on loopback.
SAME_WITHOUT = {
    "DS_ACCELERATOR": "cpu",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    **{name: str(value) for name, value in MALLOC_VARIABLES.items()},
    **INTERFACES,
}


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (1, "OWN_SETTING='two words' python3 train.py --deepspeed_config ds_config.json"),
        pytest.param(
            2, "deepspeed train.py --deepspeed_config ds_config.json", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_trial_has_the_conditions_of_the_printed_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, command: str
) -> None:
    shutil.copytree(PROGRAMS / "conditions", tmp_path / "program")
    programs = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([programs, os.environ["PATH"]]))
    folder, memory = tmp_path / "program", 2**30
    ready = prepared(command, folder, monkeypatch, slots=ranks, slot_memory_bytes=memory)
    hand = tmp_path / "hand"
    hand.mkdir()
    line = printed_line(ready, hand)
    env = {**os.environ, **ready.program.env, "HAND_DIR": str(hand)}
    with trials_of(ready, own_configuration(ready), tmp_path) as folders:
        subprocess.run(["bash", "-c", line], check=True, env=env, timeout=PATIENCE_S)
    for rank in range(ranks):
        by_hand = conditions(hand, rank)
        for folder in folders:
            found = differences(conditions(folder, rank), by_hand)
            assert not found, (folder, found)
        assert by_hand["threads"] == 1 and len(by_hand["cores"]) == min(ranks, os.cpu_count() or 1)
        assert by_hand["tensors of their own mapping"] == [False, True, True, True]


@contextlib.contextmanager
def trials_of(ready: Prepared, trial: Trial, folder: Path) -> Iterator[list[Path]]:
    """Runs a trial in a forked and in a fresh process, meanwhile what is inside."""
    engines = {}
    try:
        for name in ("warm", "cold"):
            (folder / name).mkdir()
            engines[name] = local_engine(
                replace(ready, settings=replace(ready.settings, cold=name == "cold")), folder / name
            )
        for engine in engines.values():
            engine.launch(trial)
        yield [folder / name / "trials" / trial.name for name in engines]
        for engine in engines.values():
            assert engine.poll(PATIENCE_S)
    finally:
        for engine in engines.values():
            engine.close()


def differences(of_trial: dict[str, Any], by_hand: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (of_trial.get(name), by_hand.get(name))
        for name in {**of_trial, **by_hand}
        if of_trial.get(name) != by_hand.get(name)
    }


def conditions(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank wrote, without what has to differ."""
    found: dict[str, Any] = read_json(folder / f"conditions{rank}.json")
    environment = {
        name: value
        for name, value in found["environment"].items()
        if name not in IDENTITY
        and not name.startswith("TORCHELASTIC_")
        and name not in (*side_effects.TRACKERS_OFF, "MLFLOW_TRACKING_URI")
        and SAME_WITHOUT.get(name) != value
    }
    config = next(i for i, word in enumerate(found["arguments"]) if word.endswith(".json"))
    return {
        **environment,
        **{name: value for name, value in found.items() if name != "environment"},
        "arguments": [*found["arguments"][:config], *found["arguments"][config + 1 :]],
    }
