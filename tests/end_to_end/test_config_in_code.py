"""Scripts that no argument tells their configuration: trials, full-length runs, capture."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dsat.engines.local.running import FULL_RUN_ID
from dsat.errors import ScriptFailed
from dsat.values.outcome import OutcomeKind
from testing.local import (
    PATIENCE_S,
    PROGRAMS,
    Bench,
    bench_of,
    processes_of,
    read_json,
    warnings_of,
)

pytestmark = pytest.mark.slow

WAYS = ("dict", "path", "args", "positional", "config_params")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of(
        "in_code", tmp_path_factory.mktemp("single"), own_micro_batch=3, imported=True
    ) as bench:
        yield bench


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of(
        "in_code", tmp_path_factory.mktemp("pair"), slots_per_trial=2, imported=True
    ) as bench:
        yield bench


@pytest.mark.parametrize("way", WAYS)
def test_a_trial_is_measured_with_its_own_configuration(single: Bench, way: str) -> None:
    trial = single.trial(way, micro_batch=5, gas=2, stage=2)
    outcome = single.run(trial)
    assert outcome.ok, single.log(trial)
    assert warnings_of(outcome) == ()


def test_a_data_loader_of_the_scripts_own_size_is_found_out(single: Bench) -> None:
    trial = single.trial("loader before", micro_batch=5)
    outcome = single.run(trial)
    assert outcome.kind is OutcomeKind.INVALID, single.log(trial)
    assert "feeds 3 samples, its own micro batch" in outcome.message
    trial = single.trial("loader before", micro_batch=3)
    assert single.run(trial).ok, "it is the trial's own, too"


@pytest.mark.parametrize("way", ["dict", "args"])
def test_on_two_ranks(pair: Bench, way: str) -> None:
    trial = pair.trial(way, micro_batch=5, stage=1)
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    assert warnings_of(outcome) == ()


def test_the_full_length_run_uses_it_too(single: Bench) -> None:
    folder = single.engine.train(single.trial("dict", micro_batch=5, gas=2, stage=1))
    [(trial_id, outcome)] = single.engine.poll(PATIENCE_S)
    assert trial_id == FULL_RUN_ID and outcome.ok, (folder / "stderr.log").read_text()
    assert read_json(folder / "facts0.json") == {
        "micro_batch": 5,
        "gas": 2,
        "stage": 1,
        "clipping": 1.0,
        "fed": 5,
        "steps": 100,
    }


# -- learning the configuration

OWN = read_json(PROGRAMS / "in_code" / "own.json")


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """An engine that is given no configuration."""
    folder = tmp_path_factory.mktemp("unknown")
    with bench_of("in_code", folder, ds_config={}, imported=True) as bench:
        yield bench


def learn(bench: Bench, way: str) -> dict[str, Any]:
    (bench.folder / "way").write_text(way)
    try:
        return bench.engine.capture_config()
    finally:
        assert processes_of(bench.folder / "capture") == []
        assert not list((bench.folder / "capture").glob("facts*")), "it did not train"


@pytest.mark.parametrize("way", WAYS)
def test_a_configuration_in_code_is_learned(unknown: Bench, way: str) -> None:
    assert learn(unknown, way) == OWN


def test_all_ranks_end_when_it_is_learned(pair: Bench) -> None:
    begin = time.monotonic()
    assert learn(pair, "dict") == OWN
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("way", "message", "detail"),
    [
        ("crash", "RuntimeError: the data are not there", 'raise RuntimeError("the data are'),
        ("no initialize", "without calling deepspeed.initialize with an optimizer", ""),
        ("no JSON", "cannot be written as JSON: Object of type dtype", ""),
    ],
)
def test_why_a_configuration_cannot_be_learned(
    unknown: Bench, way: str, message: str, detail: str
) -> None:
    with pytest.raises(ScriptFailed, match="could not be learned") as caught:
        learn(unknown, way)
    text = str(caught.value)
    assert message in text and str(unknown.folder / "capture" / "stderr.log") in text
    assert "\n" not in text
    assert detail in caught.value.detail


def test_a_script_that_hangs_before_its_configuration_is_ended(
    unknown: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = unknown.engine._options
    hasty = replace(options, trial=replace(options.trial, timeout_s=2.0))
    monkeypatch.setattr(unknown.engine, "_options", hasty)
    with pytest.raises(ScriptFailed, match="could not be learned: no result after 2 s"):
        learn(unknown, "hang")


def test_trials_are_run_after_it(pair: Bench) -> None:
    assert learn(pair, "dict") == OWN
    trial = pair.trial("dict", micro_batch=4)
    assert pair.run(trial).ok, pair.log(trial)
