"""Measures the optimizer steps of a live DeepSpeed engine, from inside the training process.

The engine comes from `deepspeed.initialize`'s public result; DeepSpeed's own autotuning mode is not
used, because it scores a single step. Times are taken at the ends of optimizer steps, so whatever
the training loop does between two steps (loading data, say) counts, as it does for the user. On an
asynchronous device the marks are events on its stream: nothing is synchronised inside a step.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsat.errors import Diverged, InvalidTrial
from dsat.in_trial import (
    available_memory,
    compiling,
    config_injection,
    loaders,
    precision,
    throttling,
)
from dsat.in_trial.agreement import Ranks
from dsat.in_trial.clocks import MemoryWatch, ProcessMemory, clock_for, wait_for_memory
from dsat.in_trial.conformance import (
    check_engine,
    refuse_other_ranks,
    refuse_pipeline,
    refuse_shared_samples,
)
from dsat.in_trial.losses import LossWatch
from dsat.in_trial.marks import PHASES, StepMarks
from dsat.in_trial.meter_spec import MAX_EXTRA_STEPS, MAX_SKIPPED_STEPS, MeterSpec
from dsat.in_trial.profiler import ModelProfiler
from dsat.in_trial.samples import UNSEEN, SampleCounter, elements_of, leaves_of
from dsat.in_trial.steps import CI_TARGET, StepTimes, steps_wanted, summarize
from dsat.in_trial.tokens import TokenCounter, over_ranks
from dsat.values.objective import Objective
from dsat.values.outcome import Metrics, Outcome, OutcomeKind

MORE_WHILE_COMPILING = 10  # steps beyond the most, if torch compiled in all of them
LONGEST_STORE_S = 60.0  # of warm-up, until what data loaders have in store is used up
LOOK_AT_SKIPPED = 5  # how often losses are looked at while steps are skipped

SEVERAL_ENGINES = (
    "the script trains several engines, perhaps: throughput and latency are those of the whole "
    "loop, but forward, backward, step, FLOPS and the model's size only those of the engine that "
    "trains first"
)

OWN_ACCUMULATION = (
    "the script makes an optimizer step of {k} times as many micro batches as "
    "gradient_accumulation_steps says: what is measured is such a step, so its global batch is "
    "that many times train_batch_size. To have accumulation tuned, call engine.step() after every "
    "micro batch and leave the rest to the engine"
)
SHORT_BATCHES = (
    "some optimizer steps had fewer samples than they should, as at the end of an epoch; they were "
    "not measured. Give the script more data, or drop_last=True to its data loader"
)
COMPILED = (
    "torch compiled in some steps after the first (for batches of a new shape, perhaps); they were "
    "not measured, and your training will have more of them"
)
ALWAYS_COMPILES = (
    "torch compiled something in every step: what was measured is mostly the compiler. Give the "
    "script batches of equal shapes, or let it mark what changes (torch._dynamo.mark_dynamic)"
)
NOT_WARM = (
    "the script ended after {steps} optimizer steps, before its device had run long enough to be "
    "warm: its last steps were measured. Give it more data for figures that can be relied on"
)
STORE_NOT_USED_UP = (
    "the data loader's workers prepare {batches} batches in advance, too many to use up within "
    f"{LONGEST_STORE_S:g} s: if your training waits for its data, it is slower than measured. "
    "Fewer workers, or a smaller prefetch_factor, would show it"
)
HOST_ACCIDENTS = (
    "rare steps took far longer than all others, by the host's doing rather than the training's; "
    "they are counted apart, and throughput is that of the others"
)


class TrialComplete(SystemExit):
    """Ends the training script once everything is measured, with exit status 0."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(0)
        self.outcome = outcome


def install(
    spec: MeterSpec,
    on_complete: Callable[[Outcome], None],
    on_step: Callable[[int], None] | None = None,
) -> Meter:
    """Makes a meter watch the engines that `deepspeed.initialize` returns.

    Args:
        spec: what to measure.
        on_complete: called on every rank with the outcome, before the script is ended.
        on_step: called after each optimizer step with how many there were.

    Returns:
        The meter.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    meter = Meter(spec, on_complete, on_step)
    loaders.watch()
    precision.watch()
    available_memory.adapt(spec.options.slot_memory_bytes, meter.warn)
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        wait_for_memory(get_accelerator(), int(os.environ.get("LOCAL_RANK", "0")))
        _limit_device_memory(spec)
        result = original(*args, **kwargs)
        if has_optimizer(result[0]):
            meter.watch(result[0])
        return result

    deepspeed.initialize = initialize
    config_injection.on_initialize(lambda _: refuse_other_ranks(spec.slots))
    config_injection.on_initialize(refuse_pipeline)
    config_injection.on_initialize(refuse_shared_samples)
    return meter


def has_optimizer(engine: Any) -> bool:
    """Check that an engine can train: at stage 3 a reference model has a stand-in optimizer."""
    optimizer = getattr(engine, "optimizer", None)
    return optimizer is not None and type(optimizer).__name__ != "DeepSpeedZeRoOffload"


class Meter:
    """Wraps `forward`, `backward` and `step` of the first engine that trains.

    Args:
        spec: what to measure.
        on_complete: called with the outcome before `TrialComplete` is raised.
        on_step: called after each optimizer step with how many there were.

    Attributes:
        outcome: what was measured so far; equal on every rank but for warnings and profile.
    """

    def __init__(
        self,
        spec: MeterSpec,
        on_complete: Callable[[Outcome], None],
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.spec = spec
        self._on_step = on_step
        self.watches = False
        self.attached = False
        self.steps_seen = 0
        self.outcome: Outcome | None = None
        self._start_step = self._first_measured = spec.options.start_step
        self._on_complete = on_complete
        self._complete = False
        self._inside: set[str] = set()  # phases that are being measured
        self._calls_engine = True
        self._warnings: list[str] = []
        self._before = ProcessMemory.now()

    def warn(self, text: str) -> None:
        """Adds what a person should know although the trial runs."""
        if text not in self._warnings:
            self._warnings.append(text)

    @property
    def shortfall(self) -> str:
        """Reason why nothing was measured, if the script came to its own end."""
        if not self.watches:
            return "the script ended without calling deepspeed.initialize with an optimizer"
        return (
            f"the script ended after {self.steps_seen} optimizer steps, but steps up to "
            f"{self.spec.options.end_step} are measured: give it more data or lower "
            "--end-profile-step"
        )

    def watch(self, engine: Any) -> None:
        """Starts measuring an engine at its first training step, if it is the first to make one.

        A reference model may have an optimizer too, since it shares the configuration.
        """
        if self.watches and self.spec.profile:
            self.warn(SEVERAL_ENGINES)
        self.watches = True
        for name in PHASES:
            first_use = functools.partial(self._first_use, engine, name)
            setattr(engine, name, self._wrap(getattr(engine, name), first_use))

    def _first_use(
        self, engine: Any, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if name in self._inside:
            return original(*args, **kwargs)
        if self.attached and self._engine is engine:  # the script has kept the method from before
            return getattr(engine, name)(*args, **kwargs)
        if self.attached:  # to another engine, whose loss this is not
            with self._losses.deaf():
                return original(*args, **kwargs)
        if name == "forward" and not _in_training(engine):
            return original(*args, **kwargs)
        self.attach(engine)
        if name != "forward":
            self._follow_module(engine.module)
        return getattr(engine, name)(*args, **kwargs)

    def _follow_module(self, module: Any) -> None:
        """Sees the calls of a script that calls the model itself, and never the engine."""
        began: list[tuple[Any, ...]] = []  # of the call that is under way

        def before(_: Any, args: Any, kwargs: Any) -> None:
            if "forward" not in self._inside and _in_training(self._engine) and not _in_backward():
                began[:] = [self._begin_forward(args, kwargs)]

        def after(*_: Any) -> None:
            if began:
                self._end_forward(*began.pop())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
        self._calls_engine = False
        # The first step is under way: what it was fed, and when it began, is not known.
        self._start_step = max(self._start_step, 2)
        self._first_measured = max(self._first_measured, self._start_step)

    def _measured(
        self,
        name: str,
        around: Callable[..., Any],
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._inside.add(name)
        try:
            return around(original, *args, **kwargs)
        finally:
            self._inside.discard(name)

    def attach(self, engine: Any) -> None:
        """Starts measuring an engine.

        Raises:
            InvalidTrial: it does not use the trial's configuration.
        """
        from deepspeed.accelerator import get_accelerator

        spec = self.spec = self.spec.of_engine(engine)
        check_engine(engine, micro_batch=spec.micro_batch, gas=spec.gas, stage=spec.stage)
        self.attached = True
        self._engine = engine
        self._accelerator = get_accelerator()
        self._clock = clock_for(self._accelerator)
        self._memory = MemoryWatch(self._accelerator, self._before)
        self._memory.note("init")
        self._throttling = throttling.Throttling(self._accelerator)
        self._ranks = Ranks(engine)
        # Its communicator is made while there is memory for it.
        self._ranks.maximum([0.0])
        self._losses = LossWatch(engine, functools.partial(_in_training, engine))
        self._profiler = (
            ModelProfiler(
                engine,
                micro_batch=self.spec.micro_batch,
                host_slots=self.spec.host_slots,
                slot_memory_bytes=self.spec.options.slot_memory_bytes,
            )
            if self.spec.profile
            else None
        )
        self._steps: list[StepMarks] = []
        self._early: deque[StepMarks] = deque()  # the last steps before the first that is measured
        self._samples = SampleCounter(
            spec.micro_batch,
            spec.options.own_micro_batch,
            spec.batch_dimensions,
            spec.fed_instead,
        )
        self._tokens = TokenCounter(spec.micro_batch)
        self._compiling = compiling.CompileWatch()
        self._current = StepMarks(begin=self._clock.mark())
        self._began = self._current.begin
        self._next_check = spec.options.end_step - spec.options.start_step + 1
        self._skipped = 0
        self._warm_up_over = False
        for name, around in zip(PHASES, (self._forward, self._backward, self._step), strict=True):
            measured = functools.partial(self._measured, name, around)
            setattr(engine, name, self._wrap(getattr(engine, name), measured))

    @staticmethod
    def _wrap(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        return wrapper

    # -- the three phases

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._complete:  # the script has caught the SystemExit that was to end it
            os._exit(0)
        if not _in_training(self._engine):
            return original(*args, **kwargs)
        inputs, begin = self._begin_forward(args, kwargs)
        try:
            result = original(*args, **kwargs)
        finally:
            if self._profiler is not None:
                self._profiler.leave_forward()
        self._end_forward(inputs, begin)
        return result

    def _begin_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The tensors among the arguments, and the mark where the forward pass begins."""
        inputs = list(leaves_of([*args, kwargs]))
        if not self._samples.has_begun:
            self._samples.first(inputs)
            if self._samples.warning is not None:
                self.warn(self._samples.warning)
        if self._profiler is not None and self._calls_engine:
            self._profiler.enter_forward()
        self._close_backward()
        return inputs, self._begin_phase()

    def _end_forward(self, inputs: list[Any], begin: Any) -> None:
        end = self._end_phase("forward", begin)
        # If the script calls loss.backward() itself, the backward pass ends where the next phase
        # begins.
        self._current.backward_began = end
        self._current.forwards += 1
        self._current.rows.append(self._samples.rows(inputs))
        self._current.tokens.append(self._tokens.count(inputs).tokens)
        self._current.elements += elements_of(inputs)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._profiler is not None:
            self._profiler.leave_forward()
        loss = args[0] if args else kwargs.get("loss")
        scaled = kwargs.get("scale_wrt_gas") is False
        self._losses.of_engine(loss, scaled_by_script=scaled)
        begin = self._begin_phase()
        with self._losses.deaf():
            result = original(*args, **kwargs)
        self._end_phase("backward", begin)
        self._current.backward_began = None
        return result

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._current.losses = self._losses.count
        if self._profiler is not None:
            self._profiler.leave_forward()
            self._profiler.finish_micro_steps(self._current.micro_steps or 1)
        skipped_before, steps_before = self._engine.skipped_steps, self._engine.global_steps
        self._close_backward()
        begin = self._begin_phase()
        result = original(*args, **kwargs)
        end = self._end_phase("step", begin)
        if self._engine.global_steps > steps_before:
            self._end_of_step(end, skipped=self._engine.skipped_steps > skipped_before)
        if self._profiler is not None and not self._calls_engine:
            self._profiler.enter_forward()  # of whatever the script calls until its next loss
        return result

    def _close_backward(self) -> None:
        """Ends the backward pass of a script that calls loss.backward(), if one is under way."""
        if self._current.backward_began is not None:
            self._end_phase("backward", self._current.backward_began)
            self._current.backward_began = None

    def _begin_phase(self) -> Any:
        if not self._warm_up_over:
            self._memory.reset()
        return self._clock.mark()

    def _end_phase(self, phase: str, begin: Any) -> Any:
        end = self._clock.mark()
        self._current.phases[phase].append((begin, end))
        if not self._warm_up_over:
            self._memory.note(phase)
        return end

    # -- optimizer steps

    def _end_of_step(self, end: Any, *, skipped: bool) -> None:
        self.steps_seen += 1
        if self._on_step is not None:
            self._on_step(self.steps_seen)
        marks, self._current = self._current, StepMarks(begin=end)
        marks.end = end
        marks.compiled = self._compiling.end_step()
        # A step that fp16 skipped because of an overflow is cheaper than a real one.
        self._skipped += skipped
        self._losses.end_step(micro_steps=marks.micro_steps, applied=not skipped)
        if self._skipped > MAX_SKIPPED_STEPS:
            raise Diverged(
                f"{self._skipped} optimizer steps were skipped because of fp16 overflows: the loss "
                "is not finite. Train in bf16, or mend the data or the learning rate"
            )
        applied = self.steps_seen - self._skipped
        if skipped:
            if self._skipped % LOOK_AT_SKIPPED == 0:
                self._losses.read(self._ranks.mean)
            return
        if marks.micro_steps > self.spec.gas:
            self.warn(OWN_ACCUMULATION.format(k=f"{marks.micro_steps / self.spec.gas:g}"))
        # Only a step that was made tells how many the warm-up needs.
        if applied == max(self._start_step - 1, 1) and self.spec.measures:
            more, slowest_s = self._ahead(marks, applied)
            if more:
                self._first_measured = applied + 1 + more
            self._next_check = self._affordable(self._next_check, slowest_s)
            self._early = deque(maxlen=self._next_check)
            self._current = StepMarks(begin=self._clock.mark())
        if self._start_step <= applied < self._first_measured:
            self._early.append(marks)
        self._warm_up_over = applied + 1 >= self._first_measured
        if applied >= self._first_measured:
            self._steps.append(marks)
            self._throttling.look()
            if len(self._steps) >= self._next_check:
                self._check()

    def _ahead(self, marks: StepMarks, applied: int) -> tuple[int, float]:
        """Further steps before the first that is measured, and the seconds of one step.

        The same on all ranks.
        """
        last_ms = self._clock.ms(marks.begin, marks.end)
        in_store = math.ceil(loaders.batches_in_store() / max(1, marks.micro_steps))
        used_up = int(LONGEST_STORE_S * 1e3 / max(last_ms, 1e-3))
        if in_store > used_up:
            self.warn(STORE_NOT_USED_UP.format(batches=loaders.batches_in_store()))
            in_store = used_up
        missing_ms = 0.0
        if not self._accelerator.is_synchronized_device():
            warmed_up_ms = self._clock.ms(self._began, marks.end)
            missing_ms = self.spec.options.warm_up_s * 1e3 - warmed_up_ms
        unsteady = max(in_store + 1 if in_store else 0, compiling.steps_until_planned())
        steps = max(unsteady - applied, missing_ms / max(last_ms, 1e-3))
        more = float(min(max(0, math.ceil(steps)), MAX_EXTRA_STEPS))
        more, slowest_ms = self._ranks.maximum([more, last_ms])
        return int(more), slowest_ms / 1e3

    def _affordable(self, wanted: int, step_s: float) -> int:
        """Number of the wanted steps that may be measured, at least one."""
        longest_s = self.spec.longest_s
        if longest_s is None or wanted * step_s <= longest_s:
            return max(wanted, 1)
        return max(int(longest_s / step_s), 1)

    def _check(self, *, is_last: bool = False) -> None:
        """Agrees with the other ranks on what was measured; ends the trial if it is enough.

        Args:
            is_last: the script has ended, so it is enough.
        """
        spec, seen = self.spec, len(self._steps)
        per_step = self._ranks.slowest(
            [
                [
                    *marks.milliseconds(self._clock),
                    float(marks.elements),
                    float(not marks.is_full(spec.gas, spec.micro_batch)),
                    float(marks.compiled),
                ]
                for marks in self._steps
            ]
        )
        self._losses.read(self._ranks.mean)
        fed = self._ranks.mean(
            [m.samples(spec.gas, spec.micro_batch) for m in self._steps]
            + [m.tokens_fed() for m in self._steps]
        )
        samples, tokens = fed[:seen], fed[seen:]
        if not all(marks.forwards for marks in self._steps):
            self.warn(UNSEEN)
        whole = [i for i, row in enumerate(per_step) if not row[-2]]
        if not whole:
            raise InvalidTrial(
                f"none of {seen} optimizer steps was full: there are not {spec.gas} micro batches "
                f"of {spec.micro_batch} samples in an epoch of the data. Give the script more data"
                ", or drop the last batch of an epoch (drop_last)",
                smaller_may_run=True,
            )
        if len(whole) < seen:
            self.warn(SHORT_BATCHES)
        full = [i for i in whole if not per_step[i][-1]]
        if len(full) < len(whole):
            if not full and not is_last and seen < spec.options.max_steps + MORE_WHILE_COMPILING:
                self._look_again_after(seen + len(whole))
                return
            self.warn(COMPILED if full else ALWAYS_COMPILES)
            full = full or whole
        rows = [per_step[i][:-3] for i in full]
        may_be_accident = _may_be_accident(rows, [per_step[i][-3] for i in full])
        times = summarize([row[0] for row in rows], may_be_accident)
        self.outcome = self._outcome(
            rows, times, [samples[i] for i in full], [tokens[i] for i in full]
        )
        if is_last:
            return
        measured_s = sum(row[0] for row in rows) / 1e3
        count = len(full)
        most = self._affordable(spec.options.max_steps, measured_s / count)
        enough = times.ci95 <= CI_TARGET or count >= most or self._is_beaten(self.outcome)
        missing_s = 0.0
        if not self._accelerator.is_synchronized_device() and spec.measures:
            missing_s = spec.options.measured_s - measured_s
        missing = math.ceil(missing_s / max(measured_s / count, 1e-6)) if missing_s > 0 else 0
        missing = min(missing, most + MAX_EXTRA_STEPS - seen)
        if (enough and missing <= 0) or seen >= most + MAX_EXTRA_STEPS:
            self._complete = True
            self._on_complete(self.outcome)
            raise TrialComplete(self.outcome)
        wanted = max(steps_wanted(count, times.ci95, most), count + missing)
        # Steps that were not full are made up for.
        self._look_again_after(min(most + MAX_EXTRA_STEPS, seen + max(1, wanted - count)))

    def _look_again_after(self, steps: int) -> None:
        self._next_check = steps
        self._current = StepMarks(begin=self._clock.mark())  # what the look took is no step's

    def finish(self) -> None:
        """Takes the last steps of a script that came to its own end before its device was warm.

        Does nothing if something was measured, or if even the steps that are always wanted are
        missing. Called on all ranks, if on any; they then make the same steps.

        Raises:
            InvalidTrial: none of these steps was full.
        """
        if self.outcome is not None or not self.attached or not self.spec.measures:
            return
        self._steps = [*self._early, *self._steps]
        fewest = -int(self._ranks.maximum([-float(len(self._steps))])[0])
        if fewest < self._next_check:
            return
        self._steps = self._steps[-fewest:]
        self.warn(NOT_WARM.format(steps=self.steps_seen))
        self._check(is_last=True)

    def _is_beaten(self, outcome: Outcome) -> bool:
        """Tell whether even the better end of the interval misses the best so far."""
        metrics = outcome.metrics
        assert metrics is not None
        return any(
            (value := metrics.value(name)) is not None
            and Objective(name).gain(best, value) * (1 - metrics.ci95) > 1
            for name, best in self.spec.to_beat.items()
        )

    def _outcome(
        self,
        rows: list[list[float]],
        times: StepTimes,
        samples: list[float],
        tokens: list[float],
    ) -> Outcome:
        """Return the metrics of full steps, accidents left out.

        Args:
            rows: of each step, ms: its latency and its phases.
            samples, tokens: of each step, the mean over the ranks; NaN where they are not known.
        """
        spec = self.spec
        kept = [i for i in range(len(rows)) if i not in times.accidents]
        phases = [sum(rows[i][1 + k] for i in kept) / len(kept) for k in range(len(PHASES))]
        taken_s = times.mean * len(kept) / 1e3
        throughput = sum(samples[i] for i in kept) * spec.slots / taken_s
        tokens_per_second = sum(tokens[i] for i in kept) * spec.slots / taken_s
        lengths = self._tokens.lengths(self._engine)
        self._memory.note_measured_steps()
        warnings = list(self._warnings)
        if times.accidents:
            warnings.append(HOST_ACCIDENTS)
        slowed = throttling.warning(self._ranks.maximum(self._throttling.flags()))
        warnings += [] if slowed is None else [slowed]
        profile = None
        if self._profiler is not None:
            profile = replace(
                self._profiler.result(self._accelerator),
                batch_dimensions=self._samples.dimensions,
                fed_instead=self._samples.fed_instead,
            )
        flops = profile.flops_per_sample if profile else spec.flops_per_sample
        metrics = Metrics(
            throughput=throughput,
            latency=times.mean,
            **dict(zip(PHASES, phases, strict=True)),
            FLOPS_per_gpu=None if flops is None else flops * throughput / spec.slots,
            num_steps=len(kept),
            ci95=times.ci95 if math.isfinite(times.ci95) else 1.0,
            accidents=len(times.accidents),
            lost_to_accidents=times.lost,
            tokens_per_second=None if math.isnan(tokens_per_second) else tokens_per_second,
        )
        return Outcome(
            OutcomeKind.OK,
            metrics=metrics,
            memory=self._memory.over_ranks(self._ranks.maximum),
            profile=profile,
            warnings=tuple(warnings),
            step_ms=tuple(round(row[0], 4) for row in rows),
            training=self._losses.curve(),
            sequences=over_ranks(self._ranks.maximum(lengths)),
            most_samples=self._samples_of_epoch(),
        )

    def _samples_of_epoch(self) -> int | None:
        """The samples that every rank has in an epoch, by the loader of such micro batches."""
        size = self.spec.micro_batch
        # A loader of single samples may be one whose script puts batches together itself.
        [fewest] = self._ranks.maximum([-float(loaders.samples_of_epoch(size) if size > 1 else 0)])
        return -int(fewest) or None


def _may_be_accident(rows: list[list[float]], elements: list[float]) -> list[bool]:
    """Mark the steps that spent their time inside their phases with no more work than usual.

    Waiting for data is the script's own, and longer sequences are more work.
    """
    usual = statistics.median(elements)
    return [
        sum(phases) > 0.5 * latency and size <= usual
        for (latency, *phases), size in zip(rows, elements, strict=True)
    ]


def _in_training(engine: Any) -> bool:
    import torch

    return bool(torch.is_grad_enabled() and engine.training)


def _in_backward() -> bool:
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def _limit_device_memory(spec: MeterSpec) -> None:
    """Makes the device's allocator refuse more than the slot may use."""
    from deepspeed.accelerator import get_accelerator

    limit = spec.options.slot_memory_bytes
    if limit is None or get_accelerator().device_name() != "cuda":
        return
    import torch

    device = int(os.environ.get("LOCAL_RANK", "0"))  # the one that DeepSpeed is going to use
    fraction = limit / get_accelerator().total_memory(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)
