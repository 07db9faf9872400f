"""What a trial tells of its training: losses and gradient norms, and that it diverged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch

from dsat.in_trial.losses import FIRST_STEPS, LAST_STEPS, LossWatch
from dsat.values.outcome import Outcome, OutcomeKind
from testing.local import Bench, bench_of
from testing.versions import needs

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
        pytest.param("torch.autograd.backward", marks=without_the_engine),
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


class Engine:
    """As much of an engine as losses need."""

    def __init__(self) -> None:
        self.training = True
        self.module = torch.nn.Linear(1, 1)
        self.device = torch.device("cpu")

    def gradient_accumulation_steps(self) -> int:
        return 1

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2.0**16


def alone(values: list[float]) -> list[float]:
    return values


def watch_of(*losses: float, skipped: tuple[int, ...] = ()) -> LossWatch:
    watch = LossWatch(Engine())
    for step, loss in enumerate(losses, 1):
        watch.of_engine(torch.tensor(loss), scaled_by_script=False)
        watch.end_step(micro_steps=1, applied=step not in skipped)
    return watch


@pytest.mark.parametrize(
    "losses",
    [
        (3.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1),
        (0.1, -0.2, 0.05, 0.1, -0.1, 0.3, -0.4, 0.9, -0.6),  # as of a policy gradient
        (0.0, 0.0, 0.0, 1e-6, 1e-6, 1e-6, 1e-6),  # as of GRPO
        (1.0, 1.0, 1.0, 1.0, 50.0, 50.0, 50.0, 50.0),
        (1e9, 2e9, 1e9, 2e9, 1e9, 1e9, 1e9, 1e9),
    ],
)
def test_training_that_goes_well_does_not_diverge(losses: tuple[float, ...]) -> None:
    watch_of(*losses).read(alone)


def test_an_overflow_that_fp16_skipped_is_not_the_end() -> None:
    watch = watch_of(2.0, math.inf, 2.0, skipped=(2,))
    watch.read(alone)
    assert watch.curve().losses == (2.0, None, 2.0)
    assert watch.curve().skipped == (2,)


def scaled(engine: Engine) -> None:
    loss = torch.tensor(3.0, requires_grad=True) * 1
    engine.scale(loss).backward()  # type: ignore[no-untyped-call]


def checkpointed(engine: Engine) -> None:
    """The checkpoint has a backward pass of its own."""
    weights = torch.ones((), requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda x: x * 5, weights, use_reentrant=True).backward()


def evaluated(engine: Engine) -> None:
    engine.training = False
    (torch.ones(1, requires_grad=True) * 2).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("passes", "loss"), [(scaled, 3.0), (checkpointed, 5.0), (evaluated, None)]
)
def test_losses_of_backward_passes_that_the_script_begins(
    passes: Callable[[Engine], None], loss: float | None
) -> None:
    engine = Engine()
    watch = LossWatch(engine)
    passes(engine)
    watch.end_step(micro_steps=1, applied=True)
    watch.read(alone)
    assert watch.curve().losses == (loss,)


def test_a_curve_is_no_longer_than_its_two_ends() -> None:
    count = FIRST_STEPS + LAST_STEPS + 100
    watch = watch_of(*[1.0] * count)
    watch.read(alone)
    steps = watch.curve().steps
    assert steps[:FIRST_STEPS] == tuple(range(1, FIRST_STEPS + 1))
    assert steps[FIRST_STEPS:] == tuple(range(count - LAST_STEPS + 1, count + 1))


def test_ranks_that_see_no_loss_do_not_count() -> None:
    watch = watch_of(4.0)
    watch.read(lambda values: [value / 2 for value in values])  # the other rank has none
    assert watch.curve().losses == (4.0,)
