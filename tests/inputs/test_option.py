"""Options: what their values may be, and that whatever decides trials is compared on a resume."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.inputs.estimate_settings import EstimateSettings
from dsat.inputs.option import AMOUNT, DURATION, LORA, MEMORY_SIZE, Kind, options_of
from dsat.inputs.settings import Settings
from dsat.space.plan import Plan, values_of
from dsat.values.trial import BatchTriple

OPTIONS = {own.name: own for own in options_of(Settings)}


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
    assert kind.read(text) == kind.read(kind.write(value)) == value


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (MEMORY_SIZE, ["", "GiB", "-1GiB", "0", "1PiBs", "nan", "80", 24, "1023KiB"]),
        (DURATION, ["0", "soon", "1d", "9" * 400]),
        (AMOUNT, ["0", "many", "1e400"]),
    ],
)
def test_no_measures(kind: Kind, texts: list[Any]) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=r"for example (24GiB|90s|300B)"):
            kind.read(text)


def test_adapters() -> None:
    found = {"r": "16", "target": "q_proj+v_proj"}
    assert LORA.read("r=16,target=q_proj+v_proj") == LORA.read(found) == found
    assert LORA.read(LORA.write(found)) == found
    for wrong in ("16", "r=", "r=0", "rank=8", "r=x", "r=8,dropout=2"):
        with pytest.raises(ValueError, match=r"invalid|less than|not a"):
            LORA.read(wrong)


@pytest.mark.parametrize("settings", [Settings, EstimateSettings])
def test_no_two_options_are_one(settings: Any) -> None:
    flags = [flag for own in options_of(settings) for flag in own.flags]
    assert len(flags) == len(set(flags))


# -- what decides trials

OTHER = {
    "metric": "latency",
    "zero_stages": (2,),
    "tune": ("overlap_comm",),
    "fix": ("sub_group_size",),
    "nvme_path": "/nvme",
    "seed": 7,
    "max_train_batch_size": 64,
    "min_micro_batch": 2,
    "max_micro_batch": 8,
    "max_seq_length": 512,
    "divisible_by": 4,
    "train_batch_size": 16,
    "slot_memory_bytes": 2**30,
    "memory_model": "none",
}


def _plan(**changes: Any) -> Plan:
    settings = Settings(method="asha", **{"zero_stages": (1, 2), **changes})
    return Plan(
        **values_of(settings),
        method=settings.method,
        slots_per_trial=1,
        base_config={},
        own_batch=BatchTriple(1, 1, 1),
    )


@pytest.mark.parametrize("name", OTHER)
def test_an_option_that_decides_trials_is_compared_and_called_by_its_label(name: str) -> None:
    own, earlier = OPTIONS[name], _plan()
    difference = _plan(**{name: OTHER[name]}).difference(earlier)
    was = own.write(earlier.to_json()[name])
    called = own.keyword.replace("_", " ")
    assert difference == f"{called} was {was}, now {own.write(OTHER[name])}"


def test_other_options_do_not_keep_a_run_from_going_on() -> None:
    assert _plan(slot_memory_bytes=24 * 2**30, zero_stages=(3,)).difference(_plan()) in (
        "slot memory was not given, now 24GiB",
        "zero stages was 1 2, now 3",
    ), "values are written as users write them"
    same = _plan(max_trials=9, max_slots=1, cold=True, engine="local", trial_timeout_s=1.0)
    assert same.difference(_plan()) is None
