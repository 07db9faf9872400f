"""Scripts that no argument tells their configuration: trials, full-length runs, capture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsat.engines.local.engine import FULL_RUN_ID
from dsat.trial import OutcomeKind
from tests.local import PATIENCE_S, Bench, bench_of, read_json

pytestmark = pytest.mark.slow

WAYS = ("dict", "path", "args", "positional", "config_params")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of("in_code", tmp_path_factory.mktemp("single"), own_micro_batch=3) as bench:
        yield bench


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of("in_code", tmp_path_factory.mktemp("pair"), slots_per_trial=2) as bench:
        yield bench


@pytest.mark.parametrize("way", WAYS)
def test_a_trial_is_measured_with_its_own_configuration(single: Bench, way: str) -> None:
    trial = single.trial(way, micro_batch=5, gas=2, stage=2)
    outcome = single.run(trial)
    assert outcome.ok, single.log(trial)
    assert outcome.warnings == ()


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
    assert outcome.warnings == ()


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
