"""Stopping rule of a trial: which optimizer steps are measured, and when they are enough."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from dsat.command.switches import WORKERS
from dsat.errors import Diverged, InvalidTrial
from dsat.in_trial import compiling, loaders
from dsat.in_trial.agreed_steps import AgreedStep, agree, times_of, tokens_error, usual_micro_steps
from dsat.in_trial.agreement import Ranks
from dsat.in_trial.batches import OWN_ACCUMULATION, OWN_BOUNDARY, STEP_ALWAYS, UNSEEN
from dsat.in_trial.meter_spec import MAX_EXTRA_STEPS, MAX_SKIPPED_STEPS, MeterSpec
from dsat.in_trial.step_recorder import PHASES, StepMarks, StepRecorder
from dsat.in_trial.steps import CI_TARGET, RAREST, StepTimes, steps_wanted
from dsat.values import format as fmt
from dsat.values.objective import Objective
from dsat.values.outcome import Metrics, Outcome, OutcomeKind, StepFacts
from dsat.values.trial import FEWEST_MAY_TAKE

MORE_WHILE_COMPILING = 10  # steps beyond the maximum, if torch compiled in every step
LONGEST_STORE_S = 60.0  # longest warm-up to use up the batches that data loaders have prepared
_WAITS = 0.03  # of a step; if waiting for data takes less, more workers gain nothing
CHECK_SKIPPED_EVERY = 5  # skipped steps between two checks of the losses

CONSTANT_ACCUMULATION = (
    "the script ignores gradient_accumulation_steps: it is {gas} instead of your {own}, but each "
    "optimizer step takes {taken} as before. Read it from the configuration, or map it to an "
    "option of the script (--arg-mapping gradient_accumulation_steps=--FLAG), or keep your micro "
    "batch (--min-micro-batch, --max-micro-batch)"
)
SHORT_BATCHES = (
    "optimizer steps with too few samples (perhaps at the end of an epoch) were not measured. "
    "Give the script more data, or set drop_last=True in its data loader"
)
COMPILED = (
    "steps in which torch compiled were not measured, but your training will have more of them. "
    "Batches of equal shapes avoid compilation"
)
ALWAYS_COMPILES = (
    "torch compiled in every step, so most of the measured time is the compiler's. Give the script "
    "batches of equal shapes, or mark what changes (torch._dynamo.mark_dynamic)"
)
EVALUATED = (
    "optimizer steps after an evaluation were not measured, because the evaluation would count in "
    "some trials and not in others"
)
NOT_WARM = (
    "the script ended after {steps}, before its device was warm, so the figures are unreliable. "
    "Give the script more data"
)
STORE_NOT_USED_UP = (
    "the data loader's workers prepare {batches} batches in advance, too many to use up within "
    f"{LONGEST_STORE_S:g} s, so the figures may lack the time that training waits for data. To "
    "measure that time, use fewer workers or a smaller prefetch_factor"
)
HOST_ACCIDENTS = (
    "a few steps took far longer than the others, and the figures exclude them as delays by the "
    "host. For steadier figures, end other programs on the machine. If these steps are rare work "
    "of your training, it will be slower than the figures"
)


class Measurement:
    """Measurement of one engine; all ranks make the same decisions.

    Attributes:
        outcome: the result so far; None before the first check. Equal on all ranks except for
            warnings and profile.
        is_complete: whether nothing more needs to be measured.
        steps_seen: optimizer steps of the script, including skipped ones.
    """

    def __init__(
        self, spec: MeterSpec, recorder: StepRecorder, ranks: Ranks, warnings: dict[str, None]
    ) -> None:
        self.outcome: Outcome | None = None
        self.is_complete = False
        self.steps_seen = 0
        self._spec = spec
        self._recorder = recorder
        self._ranks = ranks
        self._warnings = warnings
        self._skips = 0
        self._began = recorder.marks.begin
        self._first_measured = spec.options.start_step
        self._min_steps = spec.options.end_step - spec.options.start_step + 1
        self._next_check = self._min_steps
        self._steps: list[StepMarks] = []
        self._early: deque[StepMarks] = deque()  # the last steps before the first measured one

    def take(self, marks: StepMarks, skipped: bool) -> None:
        """Process a finished optimizer step; a step that fp16 `skipped` is not measured.

        Raises:
            Diverged: the loss is not finite, or too many steps were skipped.
            InvalidTrial: the script's batches or accumulation do not suit the trial.
        """
        self.steps_seen += 1
        marks.number = self.steps_seen
        if skipped:
            self._take_skipped()
            return
        spec, num_applied = self._spec, self.steps_seen - self._skips
        start = spec.options.start_step
        # The duration of a step that was not skipped decides how many steps the warm-up needs.
        if num_applied == max(start - 1, 1) and spec.measures:
            self._plan_warm_up(marks, num_applied)
        if start <= num_applied < self._first_measured:
            self._early.append(marks)
        self._recorder.notes_memory = num_applied + 1 < self._first_measured
        if num_applied >= self._first_measured:
            self._steps.append(marks)
            if len(self._steps) >= self._next_check:
                self._check()

    def finish(self) -> None:
        """Measure the last steps of a script that ended before its device was warm.

        Do nothing if there is a result already, or if there are too few steps. A collective call.
        """
        if self.outcome is not None or not self._spec.measures:
            return
        self._steps = [*self._early, *self._steps]
        count = -int(self._ranks.maximum([-float(len(self._steps))])[0])
        if count >= self._next_check:
            self._steps = self._steps[-count:]
            self._warn(NOT_WARM.format(steps=fmt.count(self.steps_seen, "optimizer step")))
            self._check(is_last=True)

    def _warn(self, text: str) -> None:
        self._warnings[text] = None

    def _take_skipped(self) -> None:
        self._skips += 1
        if self._skips > MAX_SKIPPED_STEPS:
            raise Diverged(
                f"{self._skips} optimizer steps were skipped, because gradients overflowed in "
                "fp16. Train in bf16, or check the data and the learning rate"
            )
        if self._skips % CHECK_SKIPPED_EVERY == 0:
            self._recorder.losses.read(self._ranks.mean)

    # -- number of steps

    def _plan_warm_up(self, marks: StepMarks, num_applied: int) -> None:
        last_ms = self._recorder.clock.ms(marks.begin, marks.end)
        values = [float(self._missing_warm_up(marks, num_applied, last_ms)), last_ms]
        more, slowest_ms = self._ranks.maximum(values)
        if more:
            self._first_measured = num_applied + 1 + int(more)
        self._next_check = self._limit_steps(self._next_check, slowest_ms / 1e3)
        self._early = deque(maxlen=self._next_check)
        self._recorder.restart()

    def _missing_warm_up(self, marks: StepMarks, num_applied: int, last_ms: float) -> int:
        """Return the remaining steps until data loaders, DeepCompile and the device are steady."""
        batches = loaders.batches_in_store
        store_steps = math.ceil(batches / max(1, marks.micro_steps))
        used_up = int(LONGEST_STORE_S * 1e3 / max(last_ms, 1e-3))
        if store_steps > used_up:
            self._warn(STORE_NOT_USED_UP.format(batches=batches))
            store_steps = used_up
        missing_ms = 0.0
        if self._recorder.is_asynchronous:
            run_ms = self._recorder.clock.ms(self._began, marks.end)
            missing_ms = self._spec.options.warm_up_s * 1e3 - run_ms
        unsteady = max(store_steps + 1 if store_steps else 0, compiling.steps_until_planned())
        steps = max(unsteady - num_applied, missing_ms / max(last_ms, 1e-3))
        return min(max(0, math.ceil(steps)), MAX_EXTRA_STEPS)

    def _limit_steps(self, steps: int, step_s: float) -> int:
        """Return how many of the wanted steps the time limit allows, at least one.

        The minimum number of steps may take three times the limit, since one or two steps give no
        confidence interval.
        """
        longest_s = self._spec.longest_s
        if longest_s is None or steps * step_s <= longest_s:
            return max(steps, 1)
        minimum = min(steps, self._min_steps, int(FEWEST_MAY_TAKE * longest_s / step_s))
        return max(int(longest_s / step_s), minimum, 1)

    def _next_check_after(self, usable: int, measured_s: float, metrics: Metrics) -> int | None:
        """Return the total number of steps before the next check; None if there are enough."""
        num_seen, step_s = len(self._steps), measured_s / usable
        affordable = self._limit_steps(self._spec.options.max_steps, step_s)
        limit = affordable + MAX_EXTRA_STEPS
        missing_s = 0.0
        if self._recorder.is_asynchronous and self._spec.measures:
            missing_s = self._spec.options.measured_s - measured_s
        num_missing = min(math.ceil(missing_s / max(step_s, 1e-6)), limit - num_seen)
        enough = metrics.ci95 <= CI_TARGET or usable >= affordable or self._is_beaten(metrics)
        if (enough and num_missing <= 0) or num_seen >= limit:
            return None
        ci95 = math.inf if usable < 3 else metrics.ci95
        target = max(steps_wanted(usable, ci95, affordable), usable + num_missing)
        # Unusable steps are replaced.
        return min(limit, num_seen + max(1, target - usable))

    def _is_beaten(self, metrics: Metrics) -> bool:
        """Return whether even the better end of the interval is worse than the best so far."""
        return any(
            (value := metrics.value(name)) is not None
            and Objective(name).gain(best, value) * (1 - metrics.ci95) > 1
            for name, best in self._spec.to_beat.items()
        )

    # -- checks

    def _check(self, *, is_last: bool = False) -> None:
        """Agree with the other ranks on the measured steps, and decide whether they are enough."""
        spec, marks = self._spec, self._steps
        samples = self._recorder.counter.check(self._ranks)
        if samples is None:
            marks = [
                replace(step, calls=[replace(call, rows=None) for call in step.calls])
                for step in marks
            ]
        else:
            spec = replace(spec, micro_batch=samples)
        steps = agree(marks, self._ranks, self._recorder.clock, spec)
        if not all(step.calls for step in marks):
            self._warn(UNSEEN)
        # With data of unknown length, a Trainer may take more micro batches after an epoch.
        factor = min(step.micro_steps for step in marks) / spec.gas
        if factor > 1:
            advice = OWN_BOUNDARY if self._recorder.has_own_boundary else STEP_ALWAYS
            self._warn(OWN_ACCUMULATION.format(k=f"{factor:g}", advice=advice))
        self._recorder.losses.read(self._ranks.mean)
        usable = self._select_steps(steps, is_last=is_last)
        next_check: int | None = 2 * len(steps)
        if usable:
            self._check_accumulation(usable)
            times = times_of(usable)
            metrics = self._metrics(usable, times)
            self.outcome = self._outcome(metrics, usable, times.accidents)
            measured_s = sum(step.ms[0] for step in usable) / 1e3
            next_check = self._next_check_after(len(usable), measured_s, metrics)
        self.is_complete = is_last or next_check is None
        if next_check is not None:
            self._next_check = next_check
            self._recorder.restart()  # the time of the check belongs to no step

    def _check_accumulation(self, steps: list[AgreedStep]) -> None:
        """Raise `InvalidTrial` if the script's accumulation ignores the configuration."""
        gas, user = self._spec.gas, self._spec.own_steps
        micro_steps = usual_micro_steps(steps)
        if user is not None and micro_steps and gas != user.gas and micro_steps == user.micro_steps:
            raise InvalidTrial(
                CONSTANT_ACCUMULATION.format(
                    taken=fmt.count(micro_steps, "micro batch"), gas=gas, own=user.gas
                )
            )

    def _select_steps(self, steps: list[AgreedStep], *, is_last: bool) -> list[AgreedStep]:
        """Return the full steps to use, if possible only those without compilation.

        Return an empty list to wait for further steps.
        """
        spec = self._spec
        full = [step for step in steps if not step.is_short]
        if not full:
            raise InvalidTrial(
                f"none of {fmt.count(len(steps), 'optimizer step')} was full: an epoch of the "
                f"data has fewer than {fmt.count(spec.gas, 'micro batch')} of "
                f"{fmt.count(spec.micro_batch, 'sample')}, or the script accumulates a constant "
                "number of them. Give the script more data, drop the last batch of an epoch "
                "(drop_last), or read accumulation from the configuration",
                smaller_may_run=True,
                most_samples=self._most_samples(),
            )
        if len(full) < len(steps):
            self._warn(SHORT_BATCHES)
        full = self._drop_evaluated(full)
        uncompiled = [step for step in full if not step.compiled]
        if len(uncompiled) == len(full):
            return full
        limit = spec.options.max_steps + MORE_WHILE_COMPILING
        if not uncompiled and not is_last and len(steps) < limit:
            return []
        self._warn(COMPILED if uncompiled else ALWAYS_COMPILES)
        return uncompiled or full

    def _drop_evaluated(self, steps: list[AgreedStep]) -> list[AgreedStep]:
        """Leave out steps with an evaluation if they are rare; else they are part of training."""
        rest = [step for step in steps if not step.evaluated]
        if len(rest) == len(steps) or (len(steps) - len(rest)) * RAREST > len(steps):
            return steps
        self._warn(EVALUATED)
        return rest

    def _metrics(self, steps: Sequence[AgreedStep], times: StepTimes) -> Metrics:
        spec = self._spec
        regular = [step for i, step in enumerate(steps) if i not in times.accidents]
        count, taken_s = len(regular), times.mean * len(regular) / 1e3
        groups = spec.parallelism.data(spec.slots)  # each has samples of its own
        throughput = sum(step.samples for step in regular) * groups / taken_s
        # Slots of a tensor-parallel group see the same tokens; slots that share a sequence do not.
        readers = spec.slots / spec.parallelism.tensor
        tokens_per_second = sum(step.tokens for step in regular) * readers / taken_s
        measured_flops = self._recorder.profiler.flops_per_sample
        flops = measured_flops if spec.profile else spec.flops_per_sample
        phases = {
            phase: sum(step.ms[1 + k] for step in regular) / count for k, phase in enumerate(PHASES)
        }
        return Metrics(
            throughput=throughput,
            latency=times.mean,
            **phases,
            FLOPS_per_gpu=None if flops is None else flops * throughput / spec.slots,
            num_steps=count,
            ci95=times.ci95 if math.isfinite(times.ci95) else 1.0,
            accidents=len(times.accidents),
            lost_to_accidents=times.lost,
            tokens_per_second=None if math.isnan(tokens_per_second) else tokens_per_second,
            data=sum(step.data_ms for step in regular) / count,
        )

    def _outcome(
        self, metrics: Metrics, steps: Sequence[AgreedStep], accidents: Sequence[int]
    ) -> Outcome:
        facts = StepFacts(
            self._spec.gas,
            usual_micro_steps(steps),
            late=tuple(steps[i].number for i in accidents),
            evaluated=sum(step.evaluated for step in steps) / len(steps),
            tokens_error=tokens_error(steps),
        )
        warning = self._recorder.counter.warning
        late_warnings = [*([warning] if warning else []), *([HOST_ACCIDENTS] if accidents else [])]
        warnings = [*self._warnings, *late_warnings]
        fields = self._recorder.observed(self._ranks)
        fields["training"] = replace(fields["training"], facts=facts)
        if fields["profile"] is not None and metrics.data < _WAITS * metrics.latency:
            switches = {n: s for n, s in fields["profile"].switches.items() if n != WORKERS}
            fields["profile"] = replace(fields["profile"], switches=switches)
        return Outcome(
            OutcomeKind.OK,
            metrics=metrics,
            warnings=tuple(warnings),
            step_ms=tuple(round(step.ms[0], 4) for step in steps),
            most_samples=self._most_samples(),
            **fields,
        )

    def _most_samples(self) -> int | None:
        """Return the largest micro batch with a full step in each epoch; None if unknown."""
        gas = self._spec.gas
        epoch_samples, _ = loaders.samples(self._spec.micro_batch, self.steps_seen * gas)
        return None if epoch_samples is None else max(1, epoch_samples // gas)
