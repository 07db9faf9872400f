"""Scripted training in this process, measured by dsat's meter on a fake engine and clock.

A test scripts what the user's training does, and checks the outcome that the trial reports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dsat.errors import DsatError
from dsat.in_trial import failures
from dsat.in_trial.adapters.install import adapt
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.meter import TrialComplete, install
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.outcome import MemoryUse, Metrics, Outcome, StepFacts
from dsat.values.trial import TrialOptions

_PLAIN = MeterSpec(TrialOptions(timeout_s=60.0, end_step=5), micro_batch=4, gas=1, stage=1, slots=1)
OPTIONS = _PLAIN.options
LONGEST = _PLAIN.longest
_OF_RUN = {field.name for field in fields(TrialOptions)}


class Clock:
    """A clock that only `advance` moves."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def perf_counter(self) -> float:
        return self.now_ms / 1e3

    def advance(self, milliseconds: float) -> None:
        self.now_ms += milliseconds


class FakeAccelerator:
    """A CPU, as DeepSpeed's accelerator describes it to the meter."""

    Event: Any = None

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self) -> str:
        return "cpu"


def use_accelerator(monkeypatch: pytest.MonkeyPatch, accelerator: FakeAccelerator) -> None:
    package, module = ModuleType("deepspeed"), ModuleType("deepspeed.accelerator")
    module.get_accelerator = lambda: accelerator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", module)


class FakeEngine:
    """The part of DeepSpeedEngine that the meter uses; its phases take scripted times."""

    def __init__(self, clock: Clock, micro_batch: int = 4, gas: int = 1) -> None:
        self.clock = clock
        self.training = True
        self.optimizer = self.basic_optimizer = object()
        self.module: Any = torch.nn.Linear(1, 1)
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.device = torch.device("cpu")
        self.times_ms = (3.0, 5.0, 2.0)
        self.overflows = False
        self._sizes = (micro_batch, gas)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._sizes[0]

    def gradient_accumulation_steps(self) -> int:
        return self._sizes[1]

    def zero_optimization_stage(self) -> int:
        return 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self._sizes[1] == 0

    def fp16_enabled(self) -> bool:
        return False

    def get_global_grad_norm(self) -> float | None:
        return None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.times_ms[0])
        return inputs

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.times_ms[1])
        return loss

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self._sizes[1]:
            return
        self.clock.advance(self.times_ms[2])
        self.global_steps += 1
        self.skipped_steps += self.overflows


@dataclass
class CoreContext:
    """A fake `core.Context`, which is also its train and searcher context and an operation."""

    rank: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    length = 77
    steps_completed = -1

    @property
    def distributed(self) -> CoreContext:
        return self

    train = searcher = distributed

    def acknowledge_out_of_ops(self) -> None:
        self.calls.append(("over", None))

    def report_validation_metrics(self, steps_completed: int, metrics: Any) -> None:
        self.steps_completed = steps_completed
        self.calls.append(("metrics", metrics))

    def report_progress(self, length: float) -> None:
        self.calls.append(("progress", length))

    def report_completed(self, metric: Any) -> None:
        self.calls.append(("completed", metric))


class Measured:
    """The meter of this process and its results.

    Attributes:
        reported: outcomes that ended the script.
    """

    def __init__(self, **settings: Any) -> None:
        of_run = {name: value for name, value in settings.items() if name in _OF_RUN}
        of_trial = {name: value for name, value in settings.items() if name not in _OF_RUN}
        options = replace(_PLAIN.options, **of_run)
        self.reported: list[Outcome] = []
        self._meter = install(replace(_PLAIN, options=options, **of_trial), self.reported.append)

    @property
    def outcome(self) -> Outcome | None:
        """The measurement so far."""
        return self._meter.outcome

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the measured engine."""
        return self._meter.steps_seen

    def at_its_end(self) -> Outcome:
        """Return the outcome of a script that ran to its end."""
        return self._meter.finish()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call `deepspeed.initialize` as a script does; return the engine."""
    deepspeed: Any = sys.modules["deepspeed"]
    return deepspeed.initialize(*args, **kwargs)[0]


def watched(make: Callable[..., Any], **settings: Any) -> Measured:
    """Install the meter for all engines that `make` returns to the script.

    Args:
        make: called by `deepspeed.initialize` with the model and the optimizer, if there are any.
            Needs the fixture `accelerator` or a similar one.
        settings: of the trial (`gas`, `to_beat`, ...) or of all trials of the run (`max_steps`).
    """
    deepspeed: Any = sys.modules["deepspeed"]

    def initialize(
        args: Any = None,
        model: Any = None,
        optimizer: Any = None,
        mpu: Any = None,
        config: Any = None,
        mesh_param: Any = None,
    ) -> tuple[Any, ...]:
        given = {"model": model, "optimizer": optimizer}
        return (
            make(**{name: each for name, each in given.items() if each is not None}),
            None,
            None,
            None,
        )

    deepspeed.initialize = initialize
    TRIAL.__init__()  # type: ignore[misc]  # resets it, as in a new process
    adapt(deepspeed)
    return Measured(**settings)


def attach(engine: Any, **settings: Any) -> Measured:
    """Install the meter on an engine, as if `deepspeed.initialize` had just returned it."""
    found = watched(lambda **_: engine, **settings)
    initialize(model=engine.module)
    return found


def attached(clock: Clock, **settings: Any) -> FakeEngine:
    """Make a fake engine with the meter installed."""
    engine = FakeEngine(clock, gas=settings.get("gas", 1))
    attach(engine, **settings)
    return engine


def train(
    engine: FakeEngine,
    *,
    steps: int = 2000,
    before: Callable[[int], None] = lambda step: None,
    loading_ms: float = 0.0,
    inputs: torch.Tensor | None = None,
) -> Outcome | None:
    """Run a user's training loop.

    Returns:
        The outcome that ended it; None if it ran to its end.
    """
    inputs = torch.zeros(engine.train_micro_batch_size_per_gpu(), 2) if inputs is None else inputs

    def loop() -> None:
        for step in range(1, steps + 1):
            before(step)
            for _ in range(engine.gradient_accumulation_steps()):
                engine.clock.advance(loading_ms)
                engine.backward(engine.forward(inputs))
                engine.step()

    return told_by(loop)


def told_by(loop: Callable[[], object]) -> Outcome | None:
    """Run a script; return the outcome that ended it, or None if it ran to its end."""
    try:
        loop()
    except TrialComplete as complete:
        return complete.outcome
    except DsatError as error:
        return failures.outcome(error)
    return None


def measured_by(loop: Callable[[], object]) -> Outcome:
    """Run a script that must not run to its end; return the outcome that ended it."""
    told = told_by(loop)
    assert told is not None, "the script came to its own end"
    return told


def measure(engine: FakeEngine, **options: Any) -> Outcome:
    """Run the loop of `train`, which must not run to its end; return the outcome that ended it."""
    measured = train(engine, **options)
    assert measured is not None
    return measured


def metrics_of(outcome: Outcome | None) -> Metrics:
    assert outcome is not None and outcome.metrics is not None
    return outcome.metrics


def facts_of(outcome: Outcome | None) -> StepFacts:
    assert outcome is not None and outcome.training is not None
    assert outcome.training.facts is not None
    return outcome.training.facts


def memory_of(outcome: Outcome | None) -> MemoryUse:
    assert outcome is not None and outcome.memory is not None
    return outcome.memory
