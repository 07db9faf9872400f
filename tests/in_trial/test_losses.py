"""What a trial reports about its training: losses, gradient norms, and divergence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dsat.in_trial.losses import FIRST_STEPS, LAST_STEPS
from dsat.values.outcome import Outcome, OutcomeKind
from testing.local import Bench, bench_of
from testing.metered import Clock, FakeEngine, attach, measured_by
from testing.versions import broken, needs

GAS = 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("seeded")
    with bench_of("seeded", folder, slots_per_trial=2, imported=True, end_step=8) as bench:
        yield bench


without_the_engine = needs("deepspeed", "0.18", "in stage 2 only engine.backward(loss) works")


@pytest.mark.slow
@pytest.mark.parametrize(
    "behaviour",
    [
        "runs",
        pytest.param("loss.backward", marks=without_the_engine),
        "scales the loss",
    ],
)
def test_losses_are_those_that_the_script_sees(pair: Bench, behaviour: str) -> None:
    trial = pair.trial(behaviour, gas=GAS)
    outcome = pair.run(trial)
    assert outcome.ok and outcome.training is not None, pair.log(trial)
    seen = [
        [float(line) for line in pair.read(trial, f"losses{rank}.jsonl").splitlines()]
        for rank in range(2)
    ]
    curve = outcome.training
    assert len(curve.steps) >= 5 and curve.steps[0] == 1
    for step, loss in zip(curve.steps, curve.losses, strict=True):
        micro = [rank[i] for rank in seen for i in range((step - 1) * GAS, step * GAS)]
        assert loss == pytest.approx(sum(micro) / len(micro), rel=1e-5), step
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


@pytest.mark.slow
def test_a_loss_that_is_not_finite_fails_the_trial(pair: Bench) -> None:
    outcome = pair.run(pair.trial("not a number"))
    assert outcome.kind is OutcomeKind.DIVERGED
    message = r"the loss is nan in optimizer step 4, after \d.* in the step before"
    assert re.search(message, outcome.message), outcome.message
    assert "Lower the learning rate" in outcome.message and outcome.detail == ""


def told_of(clock: Clock, *losses: float, skipped: tuple[int, ...] = ()) -> Outcome:
    """Return the outcome of a script with these losses, the last of which repeats."""
    engine = FakeEngine(clock)
    count = len(losses)
    attach(engine, start_step=1, end_step=count, max_steps=count)

    def loop() -> None:
        for step, loss in enumerate([*losses, *[losses[-1]] * 9], 1):
            engine.overflows = step in skipped
            engine.forward(torch.zeros(4, 1))
            engine.backward(torch.tensor(loss))
            engine.step()

    return measured_by(loop)


@pytest.mark.parametrize(
    "losses",
    [
        (3.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1),
        (0.1, -0.2, 0.05, 0.1, -0.1, 0.3, -0.4, 0.9, -0.6),  # as with a policy gradient
        (0.0, 0.0, 0.0, 1e-6, 1e-6, 1e-6, 1e-6),  # as with GRPO
        (1.0, 1.0, 1.0, 1.0, 50.0, 50.0, 50.0, 50.0),
        (1e9, 2e9, 1e9, 2e9, 1e9, 1e9, 1e9, 1e9),
        (2.0,) * (FIRST_STEPS + LAST_STEPS + 100),
    ],
)
def test_training_that_goes_well_does_not_diverge(clock: Clock, losses: tuple[float, ...]) -> None:
    """Of a long curve, both ends are kept."""
    curve = told_of(clock, *losses).training
    assert curve is not None
    numbers = range(1, len(losses) + 1)
    kept = [n for n in numbers if n <= FIRST_STEPS or n > len(losses) - LAST_STEPS]
    assert list(curve.steps) == kept
    assert list(curve.losses) == pytest.approx([losses[n - 1] for n in kept])


def test_an_overflow_that_fp16_skipped_is_not_the_end(clock: Clock) -> None:
    curve = told_of(clock, 2.0, math.inf, 2.0, skipped=(2,)).training
    assert curve is not None
    assert curve.losses[:3] == (2.0, None, 2.0)
    assert curve.skipped == (2,)
    assert told_of(clock, 2.0, math.inf, 2.0).kind is OutcomeKind.DIVERGED


def scaled(engine: Any) -> None:
    loss = torch.tensor(3.0, requires_grad=True) * 1
    engine.scale(loss).backward()


def checkpointed(engine: Any) -> None:
    """Run a checkpointed function, which has its own backward pass."""
    weights = torch.ones((), requires_grad=True)
    checkpoint(lambda x: x * 5, weights, use_reentrant=True).backward()


def evaluated(engine: Any) -> None:
    engine.training = False
    (torch.ones(1, requires_grad=True) * 2).backward()  # type: ignore[no-untyped-call]
    engine.training = True


@pytest.mark.parametrize(
    ("passes", "loss"), [(scaled, 3.0), (checkpointed, 5.0), (evaluated, None)]
)
def test_losses_of_backward_passes_that_the_script_begins(
    clock: Clock, passes: Callable[[Any], None], loss: float | None
) -> None:
    engine: Any = FakeEngine(clock)
    engine.scale = lambda value: value * 2.0**16
    attach(engine)

    def loop() -> None:
        for _ in range(9):
            engine.forward(torch.zeros(4, 1))
            passes(engine)
            engine.step()

    curve = measured_by(loop).training
    assert curve is not None and set(curve.losses) == {loss}


@pytest.mark.parametrize(("optimizer", "norm"), [("AdamW", 2.5), ("MuonWithAuxAdam", None)])
def test_no_norm_of_updates_is_taken_for_one_of_gradients(
    clock: Clock, optimizer: str, norm: float | None
) -> None:
    engine: Any = FakeEngine(clock)
    engine.basic_optimizer = type(optimizer, (), {})()
    engine.get_global_grad_norm = lambda: 2.5
    attach(engine)

    def loop() -> None:
        for _ in range(9):
            engine.forward(torch.zeros(4, 1))
            engine.backward(torch.tensor(1.0))
            engine.step()

    curve = measured_by(loop).training
    assert curve is not None and curve.gradient_norm == norm


def test_ranks_that_see_no_loss_do_not_count(
    clock: Clock, ranks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(2)
    # The other rank adds nothing to a sum.
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    engine = FakeEngine(clock)
    attach(engine, slots=2)

    def loop() -> None:
        for _ in range(9):
            engine.forward(torch.zeros(4, 1))
            engine.backward(torch.tensor(4.0))
            engine.step()

    curve = measured_by(loop).training
    assert curve is not None and set(curve.losses) == {4.0}


@pytest.mark.slow
@broken("deepspeed", ">=0.17.6,<0.18.3", "loses gradients in stage 2 with accumulation")
def test_the_gradients_norm_is_the_same_in_all_stages(pair: Bench) -> None:
    """dsat computes it in stage 0, DeepSpeed in the others; it is the norm of both ranks' mean
    gradient."""
    norms = {}
    for stage in (0, 2, 3):  # stage 1 has the optimizer of stage 2
        trial = pair.trial("runs", gas=GAS, stage=stage)
        outcome = pair.run(trial)
        assert outcome.ok and outcome.training is not None, pair.log(trial)
        norms[stage] = outcome.training.gradient_norm
    assert norms[0] and norms == pytest.approx(dict.fromkeys(norms, norms[0]), rel=1e-4)
