"""Predictions corrected by what trials used, and the micro batches that follow from them."""

from __future__ import annotations

import pytest

from dsat.memory.calibration import Calibration, Observation, calibrate, largest_micro_batch
from dsat.memory.estimate import MemoryEstimate
from dsat.trial import MemoryUse

MIB = 2**20


def simulated(micro_batch: int) -> MemoryEstimate:
    """A model of 100 MiB with 10 MiB of activations a sample; its step needs 150 MiB."""
    return MemoryEstimate(
        init=90 * MIB,
        forward=(100 + 9 * micro_batch) * MIB,
        backward=(100 + 10 * micro_batch) * MIB,
        step=150 * MIB,
    )


def observed(micro_batch: int, excess: float, context: float = 0) -> Observation:
    estimate = simulated(micro_batch)
    used = {p: getattr(estimate, p) + round(excess * MIB) for p in ("forward", "backward", "step")}
    observation = Observation.of(estimate, micro_batch, MemoryUse(used), round(context * MIB))
    assert observation is not None
    return observation


def test_a_constant_and_a_slope_are_found_again() -> None:
    found = calibrate([observed(m, 32 + 0.5 * m, context=500) for m in (1, 8, 32)])
    assert found.fixed_bytes == pytest.approx(32 * MIB)
    assert found.bytes_per_sample == pytest.approx(0.5 * MIB)
    assert found.predicted_bytes(simulated(64), 64) == pytest.approx((740 + 32 + 32 + 500) * MIB)


def test_one_trial_gives_a_constant() -> None:
    found = calibrate([observed(8, 40)])
    assert (found.fixed_bytes, found.bytes_per_sample) == (40 * MIB, 0)


def test_a_slope_is_never_negative() -> None:
    found = calibrate([observed(1, 40), observed(16, 20)])
    assert (found.fixed_bytes, found.bytes_per_sample) == (30 * MIB, 0)


def test_only_the_largest_phase_counts() -> None:
    estimate = simulated(1)
    used = {"forward": 400, "backward": 300 * MIB, "step": 200 * MIB}
    observation = Observation(estimate, 1, used)
    assert observation.phase == "backward"
    assert observation.excess == 190 * MIB


def test_a_cpu_tells_nothing() -> None:
    assert Observation.of(simulated(1), 1, MemoryUse(host_rss_bytes={"step": 5})) is None


def test_the_margin_shrinks_with_the_first_calibration() -> None:
    exact = calibrate([observed(8, 0)])
    assert Calibration().fits(simulated(1), 1, int(150 * 1.05 * MIB) + 1)
    assert not Calibration().fits(simulated(1), 1, int(150 * 1.04 * MIB))
    assert exact.fits(simulated(1), 1, int(150 * 1.02 * MIB) + 1)
    assert not exact.fits(simulated(1), 1, int(150 * 1.01 * MIB))


@pytest.mark.parametrize("largest", [1, 2, 3, 17, 100, 1000])
def test_the_largest_micro_batch_fits_and_the_next_does_not(largest: int) -> None:
    calibration = calibrate([observed(8, 0)])
    room = max(150, 100 + 10 * largest) * 1.02 * MIB + 1
    asked: list[int] = []

    def estimate(size: int) -> MemoryEstimate:
        asked.append(size)
        return simulated(size)

    found = largest_micro_batch(estimate, calibration, int(room), range(1, 2**20))
    # The step's 150 MiB leave room for five samples.
    assert found == max(5, largest)
    assert len(asked) <= 25


def test_only_allowed_micro_batches_are_found() -> None:
    assert largest_micro_batch(simulated, Calibration(), 300 * MIB, [4, 12, 18, 36]) == 18
    assert largest_micro_batch(simulated, Calibration(), 300 * MIB, [4, 12]) == 12
    assert largest_micro_batch(simulated, Calibration(), 100 * MIB, [4, 12]) is None
    assert largest_micro_batch(simulated, Calibration(), 100 * MIB, []) is None
