"""Record of optimizer steps while they run: times, batches, losses and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsat.in_trial import compiling, loaders
from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.agreement import Ranks
from dsat.in_trial.batches import BatchCounter, Fed
from dsat.in_trial.clocks import Clock, DeviceClock, MemoryWatch, ProcessMemory
from dsat.in_trial.losses import LossWatch, is_in_backward, is_training
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.profiler import ModelProfiler

PHASES = ("forward", "backward", "step")


@dataclass
class StepMarks:
    """Clock marks and contents of one optimizer step, with all its micro steps.

    Attributes:
        begin, end, phases: marks on the clock; a phase has a pair for each micro step.
        number: number of the step, counted from 1; 0 until the step ends.
        losses: number of losses that began backward passes.
        evaluated: whether the model was called outside of training.
        backward_began: start of the script's own backward pass; None if none is running.
        waited_before_s, waited_s: seconds of waiting for data loaders, before and in this step.
    """

    begin: Any
    end: Any = None
    number: int = 0
    calls: list[Fed] = field(default_factory=list)
    losses: int = 0
    compiled: bool = False
    evaluated: bool = False
    backward_began: Any = None
    waited_before_s: float = field(default_factory=lambda: loaders.waited_s)
    waited_s: float = 0.0
    phases: dict[str, list[tuple[Any, Any]]] = field(
        default_factory=lambda: {phase: [] for phase in PHASES}
    )

    @property
    def micro_steps(self) -> int:
        """Number of micro batches that the step processed; 0 if unknown.

        A script may call the model twice for one loss (pairs), or compute two losses from one call.
        It may bypass the engine's `forward` or `backward`, but hardly both.
        """
        counts = [n for n in (len(self.calls), self.losses or len(self.phases["backward"])) if n]
        return min(counts, default=0)

    def is_full(self, spec: MeterSpec) -> bool:
        """Return whether no micro step or sample is missing, as some may be at an epoch's end."""
        enough = self.micro_steps == 0 or self.micro_steps >= spec.gas
        rows = [call.rows for call in self.calls if call.rows is not None]
        return enough and all(count >= spec.micro_batch for count in rows)

    def samples(self, spec: MeterSpec) -> float:
        """Return the number of samples; a micro batch that cannot be counted counts as full."""
        if not self.calls:
            return float(spec.micro_batch * (self.micro_steps or spec.gas))
        rows = sum(spec.micro_batch if call.rows is None else call.rows for call in self.calls)
        return rows * self.micro_steps / len(self.calls)

    def tokens(self) -> float:
        """Return the tokens of all calls; NaN if unknown for one of them."""
        if not self.calls or any(call.tokens is None for call in self.calls):
            return math.nan
        return float(sum(float(call.tokens) for call in self.calls))

    def milliseconds(self, clock: Clock) -> list[float]:
        """Return the latency, each phase's total, and the wait for data outside of the phases."""
        sums = [sum(clock.ms(a, b) for a, b in self.phases[phase]) for phase in PHASES]
        latency = clock.ms(self.begin, self.end)
        # An asynchronous device may still be computing while the host waits.
        return [latency, *sums, max(0.0, min(1e3 * self.waited_s, latency - sum(sums)))]


class _Hook:
    """Hook of a module; in pickled and other copies of the module, it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        if self.call is not None:
            self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class StepRecorder:
    """Recorder of the optimizer steps of one engine.

    Args:
        memory_before: memory of the process before the model was built.
        take: receives the marks of each optimizer step, and whether fp16 skipped it.

    Attributes:
        notes_memory: whether memory peaks are recorded by phase; only in warm-up, as it costs time.
    """

    def __init__(
        self,
        engine: Any,
        spec: MeterSpec,
        *,
        memory_before: ProcessMemory,
        take: Callable[[StepMarks, bool], None],
    ) -> None:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        self._engine = engine
        self._take = take
        self._calls_engine = True
        self._in_forward = False  # of the engine
        self._forward_began: Any = None
        self._frames = compiling.count_frames()
        self.notes_memory = True
        has_events = not accelerator.is_synchronized_device() and accelerator.Event is not None
        self.clock = DeviceClock(accelerator) if has_events else Clock()
        self.memory = MemoryWatch(accelerator, memory_before)
        self.memory.note("init")
        self.losses = LossWatch(engine, spec)
        self.counter = BatchCounter(spec)
        self.profiler = ModelProfiler(engine, spec)
        self.marks = StepMarks(begin=self.clock.mark())

    @property
    def is_asynchronous(self) -> bool:
        """Return whether the device is asynchronous, with clock rates that need a warm-up."""
        return self.memory.has_allocator

    @property
    def has_own_boundary(self) -> bool:
        """Return whether the script itself sets the accumulation boundary."""
        return getattr(self._engine, "_is_gradient_accumulation_boundary", None) is not None

    def restart(self) -> None:
        """Restart the current optimizer step now."""
        self.marks = StepMarks(begin=self.clock.mark())

    def forward(self, call: Call) -> Any:
        if not is_training(self._engine):
            self.marks.evaluated = True
            return call.proceed()
        self._begin_forward(call.args, call.kwargs)
        self._in_forward = True
        try:
            result = call.proceed()
        finally:
            self._in_forward = False
            self.profiler.leave_forward()
        self._end_forward()
        return result

    def backward(self, call: Call) -> Any:
        self.profiler.leave_forward()
        scaled_by_script = call.kwargs.get("scale_wrt_gas") is False
        self.losses.add_engine_loss(call.argument("loss", 0), scaled_by_script=scaled_by_script)
        begin = self._begin_phase()
        with self.losses.ignored():
            result = call.proceed()
        self._end_phase("backward", begin)
        self.marks.backward_began = None
        return result

    def step(self, call: Call) -> Any:
        """Call the engine's `step`, which makes an optimizer step or only counts a micro step."""
        engine = self._engine
        self.marks.losses = self.losses.count
        self.profiler.leave_forward()
        self.profiler.finish_micro_steps(self.marks.micro_steps or 1)
        skipped_before, steps_before = engine.skipped_steps, engine.global_steps
        self._close_backward()
        self.losses.begin_step()
        begin = self._begin_phase()
        result = call.proceed()
        end = self._end_phase("step", begin)
        if engine.global_steps > steps_before:
            self._end_optimizer_step(end, skipped=engine.skipped_steps > skipped_before)
        if not self._calls_engine:
            self.profiler.enter_forward()  # counts all that the script calls until its next loss
        return result

    def follow_evaluations(self) -> None:
        """Record calls of the model outside of training, for example for generation."""

        def before(*_: Any) -> None:
            if not (self._in_forward or is_training(self._engine) or is_in_backward()):
                self.marks.evaluated = True

        module, hook = self._engine.module, _Hook(before)
        for part in compiling.uncompiled_parts(module):  # a hook would be compiled as well
            if part is module or callable(getattr(type(part), "generate", None)):  # as inside PEFT
                part.register_forward_pre_hook(hook)

    def follow_module(self) -> None:
        """Record calls of the model itself, for a script that never calls the engine."""

        def before(_: Any, args: Any, kwargs: Any) -> None:
            if not self._in_forward and is_training(self._engine) and not is_in_backward():
                self._begin_forward(args, kwargs)

        module = self._engine.module
        module.register_forward_pre_hook(_Hook(before), with_kwargs=True)
        module.register_forward_hook(_Hook(lambda *_: self._end_forward()))
        self._calls_engine = False

    def observed(self, ranks: Ranks) -> dict[str, Any]:
        """Return the fields of an `Outcome` that are not times; a collective call."""
        self.memory.note_measured_steps()
        return {
            "memory": self.memory.over_ranks(ranks.maximum),
            "profile": self.profiler.result(self.counter),
            "training": self.losses.curve(),
            "fixed_batch": self.counter.fixed_batch,
            "sequences": self.counter.lengths(self._engine.module, ranks.maximum),
        }

    def _begin_forward(self, args: Any, kwargs: Any) -> None:
        self._close_backward()
        self.marks.calls.append(self.counter.count([*args, kwargs]))
        if self._calls_engine:
            self.profiler.enter_forward()
        self._forward_began = self._begin_phase()

    def _end_forward(self) -> None:
        if self._forward_began is None:
            return
        # If the script calls loss.backward() itself, the backward pass ends where the next phase
        # begins.
        self.marks.backward_began = self._end_phase("forward", self._forward_began)
        self._forward_began = None

    def _close_backward(self) -> None:
        """End the script's own backward pass, if one is running."""
        if self.marks.backward_began is not None:
            self._end_phase("backward", self.marks.backward_began)
            self.marks.backward_began = None

    def _begin_phase(self) -> Any:
        if self.notes_memory:
            self.memory.reset()
        return self.clock.mark()

    def _end_phase(self, phase: str, begin: Any) -> Any:
        end = self.clock.mark()
        self.marks.phases[phase].append((begin, end))
        if self.notes_memory:
            self.memory.note(phase)
        return end

    def _end_optimizer_step(self, end: Any, *, skipped: bool) -> None:
        marks, self.marks = self.marks, StepMarks(begin=end)
        marks.end = end
        marks.waited_s = loaders.waited_s - marks.waited_before_s
        frames_before, self._frames = self._frames, compiling.count_frames()
        marks.compiled = self._frames != frames_before
        self.losses.end_step(micro_steps=marks.micro_steps, applied=not skipped)
        self._take(marks, skipped)
