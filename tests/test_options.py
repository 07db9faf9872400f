"""Options: what their values may be, and that whatever decides trials is compared on a resume."""

from __future__ import annotations

import pytest

from dsat.options import AMOUNT, DURATION, LORA, MEMORY_SIZE, Kind, write_memory_size
from dsat.prepare import installed_deepspeed
from testing.scenarios import User


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (MEMORY_SIZE, "1048576", 2**20),
        (MEMORY_SIZE, "24 gib", 24 * 2**30),
        (MEMORY_SIZE, "1.5MiB", 3 * 2**19),
        (MEMORY_SIZE, "16GB", 16 * 10**9),
        (DURATION, "90", 90.0),
        (DURATION, "90s", 90.0),
        (DURATION, "2min", 120.0),
        (DURATION, "1.5h", 5400.0),
        (AMOUNT, "300B", 3e11),
        (AMOUNT, "1.5e9", 1.5e9),
        (AMOUNT, "1E9", 1e9),
    ],
)
def test_measures(kind: Kind, text: str, value: float) -> None:
    assert kind.read(text) == value
    if kind is MEMORY_SIZE:
        assert kind.read(write_memory_size(int(value))) == value


def test_adapters() -> None:
    found = {"r": "16", "target": "q_proj+v_proj"}
    assert LORA.read("r=16,target=q_proj+v_proj") == LORA.read(found) == found
    for wrong in ("16", "r=", "r=0", "rank=8", "r=x", "r=8,dropout=2"):
        with pytest.raises(ValueError, match=r"invalid|less than|not a"):
            LORA.read(wrong)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> User:
    user = User(tmp_path_factory.mktemp("ran"))
    user.has()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed_deepspeed, "_stamp", lambda: None)
        assert user.tunes("--max-trials", 3, "--finals", 0, method="random").status == 0
    return user


@pytest.mark.parametrize(
    ("options", "is_other"),
    [
        *((option, True) for option in ("--zero-stages 2", "--search overlap_comm")),
        *((option, True) for option in ("--keep sub_group_size", "--nvme-path /nvme")),
        *((option, True) for option in ("--random-seed 7", "--max-train-batch-size 64")),
        *((option, True) for option in ("--min-micro-batch 2", "--max-micro-batch 8")),
        *((option, True) for option in ("--max-seq-length 512", "--divisible-by 4")),
        *((option, True) for option in ("--train-batch-size 16", "--slot-memory 1GiB")),
        ("--memory-model none", True),
        *((option, False) for option in ("--max-slots 1", "--no-fork", "--trial-timeout 60s")),
    ],
)
def test_a_run_goes_on_with_the_options_that_decide_its_trials(
    ran: User, options: str, is_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_deepspeed, "_stamp", lambda: None)
    told = ran.tunes(
        *("--max-trials", 3, "--finals", 0, "--resume", *options.split()), method="random"
    )
    assert told.status == (2 if is_other else 0), told.err
    label = options.split()[0].removeprefix("--").replace("-", " ")
    assert (f"{label} was " in told.err) is is_other
