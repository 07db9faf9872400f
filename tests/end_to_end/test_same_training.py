"""Real trainings compared with the user's own: harmless changes pass, and faults are found."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsat.run.same_training import Agreement, Finding, compare
from dsat.values.outcome import OutcomeKind, TrainingCurve
from testing.local import PROGRAMS, Bench, bench_of, read_json

pytestmark = pytest.mark.slow

LAST_STEP = 12
MICRO_BATCH = 8
SMALL_BUCKET = {"reduce_bucket_size": 3000, "contiguous_gradients": True}
RACING = {"overlap_comm": True, "reduce_bucket_size": 3000}


class Trainings:
    """Trains with the program `seeded`, and compares with the user's own configuration."""

    def __init__(self, bench: Bench, **zero: Any) -> None:
        self._bench = bench
        self._own = (self.train(zero=zero), self.train(zero=zero))

    def train(self, fault: str = "runs", **changes: Any) -> TrainingCurve:
        trial = self._bench.trial(fault, **{"micro_batch": MICRO_BATCH, **changes})
        outcome = self._bench.run(trial)
        assert outcome.kind is OutcomeKind.OK, outcome.message + self._bench.log(trial)
        assert outcome.training is not None
        return outcome.training

    def compare(self, fault: str = "runs", **changes: Any) -> Finding:
        other = self.train(fault, **changes)
        return compare(self._own, other, precision="fp32", same_batch=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("one_rank")
    with bench_of("seeded", folder, end_step=LAST_STEP, imported=True) as bench:
        yield Trainings(bench)


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("runs", {"stage": 2, "zero": RACING}),  # the same settings without the fault
        ("runs", {"stage": 2, "zero": SMALL_BUCKET}),
        ("runs", {"stage": 3}),
        ("runs", {"micro_batch": MICRO_BATCH // 2, "gas": 2}),
        ("forgets embedding.weight", {"stage": 1}),
        ("forgets norm.bias", {"stage": 0}),
        ("races 10", {"stage": 2, "zero": RACING}),  # as in DeepSpeed's issues #7965 and #8061
    ],
)
def test_honest_changes_train_the_same_and_faults_are_seen(
    alone: Trainings, fault: str, changes: dict[str, Any]
) -> None:
    """The faults are an optimizer that drops one gradient, and a bucket that is reduced too
    early."""
    found = alone.compare(fault, **changes)
    if fault == "runs":
        assert found == Finding(Agreement.SAME)
    else:
        assert found.differs and "Its loss in step" in found.reason, found


def test_a_script_that_autocasts_by_itself_is_not_accused_of_its_rounding(alone: Trainings) -> None:
    """Accumulation changed its losses by 2.2e-4, more than fp32 explains."""
    own = (alone.train("autocasts"), alone.train("autocasts"))
    halves = alone.train("autocasts", micro_batch=MICRO_BATCH // 2, gas=2)
    assert {each.precision for each in (*own, halves)} == {"bf16"}
    assert compare(own, halves, precision="fp32", same_batch=True) == Finding(Agreement.SAME)
    raced = alone.train("autocasts, races 3", stage=2, zero=RACING)
    assert max(map(_apart, own[0].losses, raced.losses)) > 1e-3, "which can be seen"


def _apart(one: float | None, other: float | None) -> float:
    assert one is not None and other is not None
    return abs(one - other) / abs(one)


@pytest.mark.nightly
def test_two_ranks_of_which_one_races(tmp_path: Path) -> None:
    with bench_of(
        "seeded", tmp_path, slots_per_trial=2, end_step=LAST_STEP, imported=True
    ) as bench:
        both = Trainings(bench)
        assert both.compare(stage=2, zero=RACING) == Finding(Agreement.SAME)
        found = both.compare("races 3 1", stage=2, zero=RACING)
        assert found.differs, found


@pytest.mark.nightly
def test_muon_whose_gradients_were_scattered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's Muon on a matrix that two ranks share, without and with the fault of issue #7807.

    DeepSpeed 0.19.8 corrects it in `average_tensor`; the program undoes this.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if "use_muon" not in inspect.getsource(DeepSpeedZeroOptimizer.average_tensor):
        pytest.skip("this DeepSpeed has the defect itself")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling its kernel takes minutes
    config = {
        **read_json(PROGRAMS / "seeded" / "ds_config.json"),
        "muon": True,
        "gradient_clipping": 0.0,  # else stage 0 clips the gradients, and the others the updates
        "zero_allow_untested_optimizer": True,
    }
    del config["optimizer"]
    with bench_of(
        "seeded",
        tmp_path,
        slots_per_trial=2,
        end_step=LAST_STEP,
        ds_config=config,
        imported=True,
    ) as bench:
        both = Trainings(bench, reduce_scatter=False)
        assert both.compare(stage=2, zero={"reduce_scatter": True}) == Finding(Agreement.SAME)
        assert both.compare(stage=0) == Finding(Agreement.SAME), "its norm is of the gradients"
        found = both.compare("scatters", stage=2, zero={"reduce_scatter": True})
        assert found.differs, found
