"""Predictions corrected by the memory that trials used, and the micro batches that follow."""

from __future__ import annotations

import pytest

from dsat.memory.calibration import Observation, calibrate, observe
from dsat.values.outcome import MemoryUse

MIB = 2**20
USUAL = 5 * MIB


def simulated(micro_batch: int) -> dict[str, int]:
    """Return the peaks of a model of 100 MiB with 10 MiB of activations a sample and a step of
    150 MiB."""
    return {
        "init": 90 * MIB,
        "forward": (100 + 9 * micro_batch) * MIB,
        "backward": (100 + 10 * micro_batch) * MIB,
        "step": 150 * MIB,
    }


def observed(micro_batch: int, excess: float) -> Observation:
    peaks = simulated(micro_batch)
    used = {p: peaks[p] + round(excess * MIB) for p in ("forward", "backward", "step")}
    memory = MemoryUse(used, context_bytes=0)
    observation = observe(peaks, micro_batch, memory)
    assert observation is not None
    return observation


@pytest.mark.parametrize("excesses", [{8: 30}, {1: 40, 16: 20}])
def test_one_micro_batch_and_a_falling_excess_give_a_constant(excesses: dict[int, int]) -> None:
    found = calibrate([observed(size, excess) for size, excess in excesses.items()], USUAL)
    assert (found.fixed_bytes, found.bytes_per_sample) == (30 * MIB, 0)


def test_a_formula_may_be_too_large() -> None:
    found = calibrate([observed(1, 40), observed(31, 10)], 10 * USUAL, -10 * USUAL)
    assert found.added_bytes(31) == pytest.approx(10 * MIB, rel=0.05)
    assert found.added_bytes(61) == pytest.approx(-20 * MIB, rel=0.1)


def test_small_micro_batches_tell_little_of_the_slope() -> None:
    noisy = [observed(1, 0), observed(2, 4)]  # 4 MiB more per sample, or noise
    assert calibrate(noisy, 0.1 * MIB).bytes_per_sample < 0.1 * MIB
    assert calibrate(noisy, 50 * MIB).bytes_per_sample == pytest.approx(4 * MIB, rel=0.01)


STEP = simulated(1)["step"]


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        # The phase with the largest use counts.
        (
            MemoryUse({"forward": 400, "backward": 300 * MIB, "step": 200 * MIB}),
            Observation(1, 300 * MIB, 190 * MIB),
        ),
        # On a CPU, memory beyond the imports counts; before the first step, it is the script's.
        (
            MemoryUse(host_rss_bytes={"init": 900, "forward": 700, "step": 650}, context_bytes=500),
            Observation(1, 200, 0, 500, is_exact=False),
        ),
        # With a limit, the memory that counts against the limit is known.
        (
            MemoryUse(host_rss_bytes={"init": 900}, data_bytes=STEP - 7),
            Observation(1, STEP - 7, -7),
        ),
        # A resident set never lowers a prediction, as it lacks untouched pages.
        (MemoryUse(host_rss_bytes={"step": 50 * MIB}), Observation(1, 50 * MIB, 0, is_exact=False)),
        (
            MemoryUse(host_rss_bytes={"step": 200 * MIB}),
            Observation(1, 200 * MIB, 50 * MIB, is_exact=False),
        ),
        (MemoryUse(), None),
    ],
)
def test_what_a_trial_shows_of_its_memory(use: MemoryUse, expected: Observation | None) -> None:
    assert observe(simulated(1), 1, use) == expected
