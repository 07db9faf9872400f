"""Meter of the optimizer steps of a live DeepSpeed engine, inside the training process.

DeepSpeed's own autotuning mode is not used, because it scores a single step. A step lasts from the
end of one optimizer step to the end of the next, so loading data counts. On an asynchronous device,
events on its stream measure the times, and nothing is synchronised inside a step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from dsat.errors import DsatError, InvalidTrial
from dsat.in_trial import config_injection, failures, loaders
from dsat.in_trial.adapters import install as adapters
from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.adapters.trial import TRIAL, Phase
from dsat.in_trial.agreement import Ranks, rank_and_size
from dsat.in_trial.clocks import ProcessMemory, limit_allocator, wait_for_memory
from dsat.in_trial.conformance import check_arguments, check_engine
from dsat.in_trial.losses import LossWatch, is_training
from dsat.in_trial.measurement import Measurement
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.profiler import device_name
from dsat.in_trial.step_recorder import StepMarks, StepRecorder
from dsat.values.format import count
from dsat.values.outcome import Outcome, OutcomeKind

# A critic may take 100 steps between two steps of a generator (Arjovsky et al., arXiv:1701.07875).
_TIMES_AS_LONG = 20  # another engine may train alone for this many times the measured steps
RESUMED = (
    "it continued from the checkpoint {}, where the training may be over. Tune it with another "
    "checkpoint folder, or without resuming. Otherwise, "
)
NO_ENGINE = "the script ended without calling deepspeed.initialize with an optimizer"


class TrialComplete(SystemExit):
    """Exit of the training script, with status 0, after its measurement or its failure."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(0)
        self.outcome = outcome


def install(spec: MeterSpec, on_complete: Callable[[Outcome], None]) -> Meter:
    """Install and return a meter for the engines that `deepspeed.initialize` returns."""
    from deepspeed.accelerator import get_accelerator

    adapters.install()
    if TRIAL.phase is Phase.INERT:
        TRIAL.phase = Phase.ON_CLUSTER
    meter = Meter(spec, on_complete)
    TRIAL.meter = meter

    def begin(arguments: dict[str, Any]) -> None:
        meter.device_name = ""
        check_arguments(arguments, spec.slots)
        device = int(os.environ.get("LOCAL_RANK", "0"))  # the device that DeepSpeed is going to use
        wait_for_memory(get_accelerator(), device)
        meter.device_name = device_name(get_accelerator(), device)
        limit_allocator(get_accelerator(), spec.options.slot_memory_bytes, device)

    TRIAL.calls.before_engine.append(begin)
    TRIAL.calls.after_engine.append(meter.watch)
    return meter


class Meter:
    """Meter of the first engine that trains, through its `forward`, `backward` and `step`.

    Args:
        on_complete: receives the outcome before `TrialComplete` is raised.

    Attributes:
        device_name: as in `ModelProfile`; None before the script calls `deepspeed.initialize`.
        has_trainable_engine: whether an engine that may train exists.
    """

    def __init__(self, spec: MeterSpec, on_complete: Callable[[Outcome], None]) -> None:
        self.spec = spec
        self.device_name: str | None = None
        self.warnings: dict[str, None] = {}
        self.has_trainable_engine = False
        self._on_complete = on_complete
        self._memory_before = ProcessMemory.now()
        self._phases: set[str] = set()  # running phases of the measured engine
        self._engine: Any = None  # the measured engine
        self._failure: Outcome | None = None  # ends the trial even if the script catches it
        self._is_ended = False
        self._engine_text = ""  # part of a message: the engine whose steps count, if several train
        self._other_steps = 0  # of other engines since the last call of the measured one
        self._recorder: StepRecorder
        self._measurement: Measurement | None = None

    def warn(self, text: str) -> None:
        self.warnings[text] = None

    @property
    def steps_seen(self) -> int:
        return 0 if self._measurement is None else self._measurement.steps_seen

    @property
    def outcome(self) -> Outcome | None:
        """Failure that ended the measurement, or else the result so far; None if neither exists."""
        measured = None if self._measurement is None else self._measurement.outcome
        return measured if self._failure is None else self._failure

    @property
    def losses(self) -> LossWatch | None:
        return None if self._engine is None else self._recorder.losses

    @property
    def shortfall(self) -> InvalidTrial:
        """Reason why nothing was measured before the script's end."""
        if not self.has_trainable_engine:
            return InvalidTrial(NO_ENGINE)
        spec = self.spec
        _, samples = loaders.samples(spec.micro_batch, self.steps_seen * spec.gas)
        micro_batch = samples // max(1, spec.options.end_step * spec.gas)
        advice = RESUMED.format(failures.resumed[-1]) if failures.resumed else ""
        steps = count(self.steps_seen, "optimizer step") + self._engine_text
        return InvalidTrial(
            f"the script ended after {steps}, but dsat measures up to step "
            f"{spec.options.end_step}: {advice}give the script more data, or lower "
            "--end-profile-step",
            smaller_may_run=self.steps_seen > 0 or not failures.resumed,
            most_samples=micro_batch if 0 < micro_batch < spec.micro_batch else None,
        )

    def finish(self) -> Outcome:
        """Return the outcome of a script that ended by itself; a collective call."""
        try:
            if self._measurement is not None and self._failure is None:
                self._measurement.finish()
        except DsatError as error:
            self._failure = failures.outcome(error)
        except RuntimeError as error:  # the script has already ended its process group
            print(f"dsat: nothing more can be measured: {error}", file=sys.stderr)
        return self.outcome or failures.outcome(self.shortfall)

    def describe(self, error: BaseException) -> Outcome:
        """Return the outcome of an error.

        Running out of memory with the user's micro batch says nothing about the trial's own.
        """
        outcome = failures.outcome(error)
        if self._engine is None or not outcome.kind.is_out_of_memory:
            return outcome
        refusal = self._recorder.counter.refuse_own()
        return outcome if refusal is None else failures.outcome(refusal)

    def watch(self, engine: Any) -> None:
        """Wrap the methods of an engine with an optimizer; the first that trains is measured.

        A reference model may have an optimizer too, because it shares the configuration.
        """
        # `engine.optimizer` may be a dummy (`DummyOptim` of runtime/engine.py, since before 0.14).
        if getattr(engine, "basic_optimizer", None) is None:
            return
        if not self.has_trainable_engine:
            loaders.begin_training()
        self.has_trainable_engine = True
        adapters.adapt_engine(engine)

    def attach(self, engine: Any, *, first_step: int = 1) -> None:
        """Start the measurement of an engine, at the optimizer step `first_step` or later.

        Raises:
            InvalidTrial: the engine does not have the trial's configuration.
        """
        spec = self.spec.complete_from(engine)
        check_engine(engine, spec)
        start = max(first_step, spec.options.start_step)
        end = max(start, spec.options.end_step)
        self.spec = replace(spec, options=replace(spec.options, start_step=start, end_step=end))
        self._recorder = StepRecorder(
            engine, self.spec, memory_before=self._memory_before, take=self._take
        )
        self._engine = engine
        self._recorder.follow_evaluations()
        ranks = Ranks(engine)
        ranks.maximum([0.0])  # makes the communicator while there is memory for it
        self._measurement = Measurement(self.spec, self._recorder, ranks, self.warnings)

    def call(self, name: str, call: Call) -> Any:
        """Call an engine's method for a phase; record it if the engine is measured."""
        if name in self._phases:
            return call.proceed()
        if self._is_ended:
            os._exit(0)  # the script has caught `TrialComplete`
        if self._failure is not None:  # the script has caught the failure, and continues
            self._end(self._failure)
        try:
            return self._record_call(name, call)
        except Exception as error:
            trains = self._engine is call.owner and (name != "forward" or is_training(call.owner))
            outcome = self.describe(error)
            # The script may handle memory that runs out elsewhere (an evaluation, another engine).
            if isinstance(error, DsatError) or (trains and outcome.kind is not OutcomeKind.ERROR):
                self._failure = outcome
            raise

    def _record_call(self, name: str, call: Call) -> Any:
        engine = call.owner
        if self._engine is None and (name != "forward" or is_training(engine)):
            self.attach(engine, first_step=1 if name == "forward" else 2)
            if name != "forward":  # the script calls the model itself, with unknown inputs
                self._recorder.follow_module()
        if self._engine is None:
            return call.proceed()
        if self._engine is not engine:  # its losses do not count
            if name != "forward":  # a reference model makes no backward pass
                self.warn(config_injection.SEVERAL_ENGINES)
                self._engine_text = " of the engine that trains first"
            if name == "step":
                self._count_other_step()
            with self._recorder.losses.ignored():
                return call.proceed()
        self._other_steps = 0
        self._phases.add(name)
        try:
            return getattr(self._recorder, name)(call)
        finally:
            self._phases.discard(name)

    def _count_other_step(self) -> None:
        """Count a step of another engine; raise InvalidTrial if the measured one has stopped."""
        self._other_steps += 1
        if self._other_steps > _TIMES_AS_LONG * self.spec.options.end_step * self.spec.gas:
            steps = count(self.steps_seen, "optimizer step")
            raise InvalidTrial(
                f"the script's first engine stopped after {steps}, and another engine trains on. "
                "dsat measures the first: change the command so that it skips this short training"
            )

    def _take(self, marks: StepMarks, skipped: bool) -> None:
        measurement = self._measurement
        assert measurement is not None
        measurement.take(marks, skipped)
        if rank_and_size()[0] == 0:
            TRIAL.progress.count(measurement.steps_seen)
        if measurement.is_complete and measurement.outcome is not None:
            self._end(measurement.outcome)

    def _end(self, outcome: Outcome) -> NoReturn:
        self._is_ended = True
        self._on_complete(outcome)
        raise TrialComplete(outcome)
