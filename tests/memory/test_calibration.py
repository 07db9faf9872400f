"""Predictions corrected by what trials used, and the micro batches that follow from them."""

from __future__ import annotations

import pytest

from dsat.memory.calibration import Observation, calibrate, observe
from dsat.values.outcome import MemoryUse

MIB = 2**20
USUAL = 5 * MIB


def simulated(micro_batch: int) -> dict[str, int]:
    """A model of 100 MiB with 10 MiB of activations a sample; its step needs 150 MiB."""
    return {
        "init": 90 * MIB,
        "forward": (100 + 9 * micro_batch) * MIB,
        "backward": (100 + 10 * micro_batch) * MIB,
        "step": 150 * MIB,
    }


def observed(micro_batch: int, excess: float, context: float = 0) -> Observation:
    peaks = simulated(micro_batch)
    used = {p: peaks[p] + round(excess * MIB) for p in ("forward", "backward", "step")}
    memory = MemoryUse(used, context_bytes=round(context * MIB))
    observation = observe(peaks, micro_batch, memory)
    assert observation is not None
    return observation


def test_a_constant_and_a_slope_are_found_again() -> None:
    found = calibrate([observed(m, 32 + 0.5 * m, context=500) for m in (1, 8, 32)], USUAL)
    assert found.fixed_bytes == pytest.approx(32 * MIB, rel=0.05)
    assert found.bytes_per_sample == pytest.approx(0.5 * MIB, rel=0.05)
    assert found.added_bytes(64) == pytest.approx(64 * MIB, rel=0.05)
    assert found.context_bytes == 500 * MIB


@pytest.mark.parametrize("excesses", [{8: 30}, {1: 40, 16: 20}])
def test_one_micro_batch_and_a_falling_excess_give_a_constant(excesses: dict[int, int]) -> None:
    found = calibrate([observed(size, excess) for size, excess in excesses.items()], USUAL)
    assert (found.fixed_bytes, found.bytes_per_sample) == (30 * MIB, 0)


def test_a_formula_may_be_too_large() -> None:
    found = calibrate([observed(1, 40), observed(31, 10)], 10 * USUAL, -10 * USUAL)
    assert found.added_bytes(31) == pytest.approx(10 * MIB, rel=0.05)
    assert found.added_bytes(61) == pytest.approx(-20 * MIB, rel=0.1)


def test_only_the_largest_phase_counts() -> None:
    memory = MemoryUse({"forward": 400, "backward": 300 * MIB, "step": 200 * MIB})
    assert observe(simulated(1), 1, memory) == Observation(1, 300 * MIB, 190 * MIB)


def test_small_micro_batches_tell_little_of_the_slope() -> None:
    noisy = [observed(1, 0), observed(2, 4)]  # 4 MiB more per sample, or noise
    assert calibrate(noisy, 0.1 * MIB).bytes_per_sample < 0.1 * MIB
    assert calibrate(noisy, 50 * MIB).bytes_per_sample == pytest.approx(4 * MIB, rel=0.01)


def test_a_cpu_shows_what_came_on_top_of_the_imports() -> None:
    use = MemoryUse(host_rss_bytes={"init": 900, "forward": 700, "step": 650}, context_bytes=500)
    observation = observe(simulated(1), 1, use)
    assert observation is not None
    assert observation.used == 200, "what the script did before the first step is not the model's"
    assert observe(simulated(1), 1, MemoryUse()) is None


def test_a_cpu_with_a_limit_shows_what_counted_against_it() -> None:
    peaks = simulated(1)
    for more in (-7, 7):
        use = MemoryUse(host_rss_bytes={"init": 900}, data_bytes=peaks["step"] + more)
        assert observe(peaks, 1, use) == Observation(1, peaks["step"] + more, more)


def test_a_resident_set_never_lowers_a_prediction() -> None:
    """Pages that nobody touched are not in it."""
    for used, excess in ((50, 0), (200, 50)):
        use = MemoryUse(host_rss_bytes={"step": used * MIB})
        expected = Observation(1, used * MIB, excess * MIB, is_exact=False)
        assert observe(simulated(1), 1, use) == expected
