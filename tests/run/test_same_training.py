"""Comparison of losses: what is rounding, what is another training, what cannot be compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsat.run.same_training import Agreement, compare, precision_of, suspects
from dsat.values.outcome import TrainingCurve


def curve(
    *,
    steps: int = 20,
    noise: float = 0.0,
    slower: float = 1.0,
    start: float = 5.0,
    seed: int = 0,
    skipped: tuple[int, ...] = (),
) -> TrainingCurve:
    """Return losses that fall from `start`, at `slower` times the usual rate, with rounding
    errors."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(steps)
    losses = start - slower * 0.05 * numbers
    losses = losses * (1 + noise * np.sqrt(numbers) * rng.normal(size=steps))
    known = tuple(float(loss) for loss in losses)
    return TrainingCurve(tuple(range(1, steps + 1)), known, skipped)


OWN = (curve(), curve())
NOISY = (curve(noise=2e-3, seed=1), curve(noise=2e-3, seed=2))
IN_BF16 = replace(curve(noise=5e-4), precision="bf16")


@pytest.mark.parametrize(
    ("other", "precision", "agreement"),
    [
        (curve(), "fp32", Agreement.SAME),
        (curve(noise=1e-6), "fp32", Agreement.SAME),
        (curve(noise=5e-4), "bf16", Agreement.SAME),
        (curve(noise=1e-2), "fp32", Agreement.DIFFERENT),
        (curve(slower=0.8), "fp32", Agreement.DIFFERENT),
        (curve(slower=0.2), "bf16", Agreement.DIFFERENT),
        (curve(start=5.1), "fp32", Agreement.UNKNOWN),
        (curve(steps=2), "fp32", Agreement.UNKNOWN),
        (TrainingCurve((1, 2, 3), (None,) * 3), "fp32", Agreement.UNKNOWN),
        # The precision that the script chose itself decides, not the configured one.
        (curve(noise=5e-4), "fp32", Agreement.DIFFERENT),
        (IN_BF16, "fp32", Agreement.SAME),
        (replace(IN_BF16, precision="fp32"), "bf16", Agreement.SAME),
        # Skipped steps end the comparison.
        (curve(slower=0.0, skipped=(4,)), "fp16", Agreement.DIFFERENT),
        (curve(skipped=(2,)), "fp16", Agreement.UNKNOWN),
    ],
)
def test_losses_agree_within_rounding(
    other: TrainingCurve, precision: str, agreement: Agreement
) -> None:
    found = compare(OWN, other, precision=precision, same_batch=True)
    assert found.agreement is agreement
    assert bool(found.reason) == (agreement is not Agreement.SAME)


@pytest.mark.parametrize(
    ("own", "other", "agreement"),
    [
        (tuple(replace(each, precision="bf16") for each in OWN), curve(noise=5e-4), Agreement.SAME),
        # A difference as large as between two runs of the baseline does not count.
        (NOISY, curve(noise=2e-3, seed=3), Agreement.SAME),
        (OWN, curve(noise=2e-3, seed=3), Agreement.DIFFERENT),
        (NOISY, curve(slower=0.0), Agreement.DIFFERENT),
    ],
)
def test_runs_of_ones_own_say_how_far_losses_may_differ(
    own: tuple[TrainingCurve, ...], other: TrainingCurve, agreement: Agreement
) -> None:
    assert compare(own, other, precision="fp32", same_batch=True).agreement is agreement


@pytest.mark.parametrize(
    ("losses", "other", "agreement"),
    [
        ((0.3, -0.2, 0.001), (0.3, -0.2, 0.001003), Agreement.SAME),
        ((0.3, -0.2, 0.001), (0.3, -0.2, 0.101), Agreement.DIFFERENT),
        ((0.0, 0.0, 1e-6), (1e-8, 0.0, 1.1e-6), Agreement.SAME),
        ((2.0, 9e4, 1.9), (2.0, 9e4, 1.8), Agreement.DIFFERENT),
    ],
)
def test_a_loss_that_is_a_difference_rounds_as_its_terms_do(
    losses: tuple[float, ...], other: tuple[float, ...], agreement: Agreement
) -> None:
    """Such are policy gradients, with advantages of mean 0; a single spike is not."""
    own, its = (TrainingCurve(tuple(range(1, 1 + len(each))), each) for each in (losses, other))
    assert compare((own, own), its, precision="fp32", same_batch=True).agreement is agreement


def test_where_a_comparison_is_impossible_that_is_said() -> None:
    def reason(own: tuple[TrainingCurve, ...], same_batch: bool = True) -> str:
        found = compare(own, curve(), precision="fp32", same_batch=same_batch)
        assert found.agreement is Agreement.UNKNOWN
        return found.reason

    assert "global batch size differs" in reason(OWN, same_batch=False)
    assert "your own configuration recorded losses only once" in reason(OWN[:1])
    assert "your own configuration recorded too few" in reason((curve(steps=2),) * 2)
    unseeded = (curve(start=5.0), curve(start=5.2))
    assert "sets no seed" in reason(unseeded) and "3.85 %" in reason(unseeded)
    found = compare(OWN, curve(start=5.3), precision="fp32", same_batch=True)
    assert (
        "the first loss is 5.3 instead of 5. The reason may be different data, weights"
        in found.reason
    )
    assert "dropout draws new ones for another micro batch" in found.reason
    assert "a loss that depends on the micro batch (in-batch negatives" in found.reason


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp32"),  # the script's
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16"),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "fp16"),
    ],
)
def test_the_precision_of_a_configuration(config: dict[str, object], precision: str) -> None:
    assert precision_of(config) == precision


def test_who_is_to_blame() -> None:
    changes = {"stage": (1, 2), "overlap_comm": (None, True), "reduce_bucket_size": (5, 7)}
    same = [{"stage": (1, 2)}, {"reduce_bucket_size": (5, 8)}]
    assert set(suspects(changes, same)) == {"overlap_comm", "reduce_bucket_size"}
    assert set(suspects(changes, [*same, {"reduce_bucket_size": (5, 7)}])) == {"overlap_comm"}
    assert suspects(changes, [changes]) == changes


def test_gradients_differ_where_losses_do_not() -> None:
    """DeepSpeed 0.18.2 has such a fault in stage 2 with accumulation (DeepSpeed#7718)."""
    own = tuple(
        replace(each, gradient_norm=norm) for each, norm in zip(OWN, (4.737, 4.738), strict=True)
    )
    wrong = replace(curve(noise=1e-6), gradient_norm=1.626)
    found = compare(own, wrong, precision="bf16", same_batch=True)
    assert found.differs and found.of_gradients
    assert "1.626 instead of 4.737" in found.reason
    rounded = replace(wrong, gradient_norm=4.5)
    assert not compare(own, rounded, precision="bf16", same_batch=True).differs
    assert compare(own, rounded, precision="fp32", same_batch=True).of_gradients


def test_gradients_are_not_compared_without_a_seed_or_a_norm() -> None:
    its = replace(curve(), gradient_norm=1.626)
    assert not compare(OWN, its, precision="fp32", same_batch=True).differs  # an older journal
    unseeded = tuple(
        replace(each, gradient_norm=norm) for each, norm in zip(OWN, (4.7, 3.1), strict=True)
    )
    assert not compare(unseeded, its, precision="fp32", same_batch=True).differs
    other_loss = replace(curve(start=5.3), gradient_norm=1.626)
    own = tuple(replace(each, gradient_norm=4.7) for each in OWN)
    assert not compare(own, other_loss, precision="fp32", same_batch=True).differs
