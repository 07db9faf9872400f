"""The first trials: the user's own configuration, and others until one profiles the model."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from dsat.run import strategies
from dsat.run.run import Run
from dsat.run.trial_factory import make_trial
from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.parallelism import Parallelism
from dsat.values.trial import BatchTriple, Trial, TrialKind
from dsat.values.zero_strategy import NVME, Strategy, read_strategy

# Parts of traceback lines that are not from the user's code: of installed packages, Python's own
# modules, code without a file, and compiled kernels.
_IN_LIBRARY = ("-packages/", "/deepspeed/", "/lib/python3.", '"<', "torchinductor_")


class ProfilePhase:
    """The first trials: the user's own configuration and, if it fails, others until one runs.

    The others change first only the micro batch, to the smallest one; then also the strategy, and
    then also the number of devices that share a sample.

    Attributes:
        profile: the model's profile; None before a trial ran.
        failure: why the model cannot be profiled; None while it still may be.
    """

    def __init__(self, plan: Plan, run: Run) -> None:
        self.profile: ModelProfile | None = None
        self.failure: str | None = None
        self._keeps_micro_batch = False  # in the search; see `strategies.keeps_micro_batch`
        self._plan, self._run = plan, run
        self._is_fallback = False
        self._last_error: str | None = None  # message of the last trial; None unless an ERROR
        self._failed_sizes: set[int] = set()  # micro batches that failed in this strategy
        # Replacements for the user's strategy, which DeepSpeed refused or which did not fit.
        self._strategies: list[Strategy] = []
        self._next_micro_batch: int | None = None  # of the next profile trial

    @cached_property
    def _fallbacks(self) -> list[Strategy]:
        """The fallback strategies that were not tried yet."""
        return list(strategies.fallbacks(self._plan))

    @cached_property
    def _divisions(self) -> list[Parallelism]:
        """Parallelisms to try in order: the next one if no fallback strategy fits with the last."""
        return strategies.divisions(self._plan)

    @property
    def over(self) -> bool:
        return self.profile is not None

    def make_space(self, plan: Plan) -> Space:
        """Return the search space of a plan, once the model is profiled."""
        assert self.profile is not None
        if self._keeps_micro_batch:
            plan = replace(plan, micro_batches=(plan.own_batch.micro_batch,))
        return strategies.make_space(plan, self.profile, only=self._strategies)

    def next_trial(self) -> Trial | None:
        """Return the trial to start next; None to wait for an outcome."""
        run, user_batch, switches = self._run, self._plan.own_batch, self._plan.switches
        if not run.trials:
            return make_trial(run, TrialKind.BASELINE, user_batch.config(), user_batch, switches)
        micro_batch = self._next_micro_batch
        if micro_batch is None or run.running:
            return None
        slots, shared = self._plan.slots_per_trial, self._divisions[0]
        batch = BatchTriple.on(slots, shared, micro_batch=micro_batch)
        return make_trial(run, TrialKind.PROFILE, self._overrides(micro_batch), batch, switches)

    def update(self, trial: Trial, outcome: Outcome) -> None:
        """Process the outcome of a trial of this phase."""
        profile, self._next_micro_batch = outcome.profile, None
        if not outcome.ok or profile is None:
            if self._run.batch_flag.supersedes(trial):  # the next trial sets the script's flag
                self._next_micro_batch = trial.batch.micro_batch
            elif trial.kind is TrialKind.BASELINE and self._may_fit_smaller(outcome):
                self._next_micro_batch = self._smallest_micro_batch
            else:
                self._on_failure(trial, outcome)
        elif self._plan.metric == "FLOPS_per_gpu" and not profile.flops_per_sample:
            self.failure = (
                "the model was not profiled: no FLOPs could be counted (custom kernels?). "
                "Use --metric throughput"
            )
        elif (
            self._plan.metric == "tokens_per_second" and outcome.value(self._plan.objective) is None
        ):
            self.failure = (
                "the model was not profiled: no tokens could be counted, because its inputs have "
                "no integer tensor of batch x length. Use --metric throughput"
            )
        else:
            self.profile = profile
            self._keeps_micro_batch = strategies.keeps_micro_batch(self._plan, outcome)

    def _may_fit_smaller(self, outcome: Outcome) -> bool:
        """Return whether the smallest micro batch may run although the user's one failed."""
        user_batch = self._plan.own_batch
        if outcome.kind is OutcomeKind.INVALID:
            return outcome.smaller_may_run and user_batch.micro_batch > self._smallest_micro_batch
        if outcome.kind is OutcomeKind.ERROR:
            return False  # `_on_failure` decides: it tries both micro batches
        return user_batch.config() != self._overrides(self._smallest_micro_batch)

    def _on_failure(self, trial: Trial, outcome: Outcome) -> None:
        """Choose the next configuration to profile the model with, or give up."""
        smallest, user_size = self._smallest_micro_batch, self._plan.own_batch.micro_batch
        if outcome.kind is OutcomeKind.ERROR and _is_of_script(trial, outcome):
            # Other configurations would fail too.
            self.failure = outcome.describe(name_of_trial(trial))
            return
        failed = outcome.kind is OutcomeKind.ERROR
        is_repeated = failed and bool(outcome.message) and outcome.message == self._last_error
        self._last_error = outcome.message if failed else None
        if failed and not self._strategies and self._is_refused(outcome):
            self._strategies = [s for s in strategies.searched(self._plan) if s.stage > 0]
            if self._strategies:
                self._begin_again()
                return
        self._failed_sizes.add(trial.batch.micro_batch)
        # Some models cannot train on so few samples (batch normalisation, say).
        if failed and not is_repeated and not {smallest, user_size} <= self._failed_sizes:
            self._next_micro_batch = user_size if smallest in self._failed_sizes else smallest
            return
        fallback_failed = failed and self._is_fallback and not is_repeated
        if (outcome.kind.is_out_of_memory or fallback_failed) and self._fallbacks:
            strategy = self._fallbacks.pop(0)
            rest = [s for s in self._fallbacks if s.offload_optimizer != NVME]
            self._strategies, self._is_fallback = [strategy, *rest], True
            self._begin_again()
        elif outcome.kind.is_out_of_memory and len(self._divisions) > 1:
            self._divisions.pop(0)
            self._begin_again()
        else:
            self.failure = outcome.describe(name_of_trial(trial))

    def _begin_again(self) -> None:
        """Begin again with the smallest micro batch, in another strategy or parallelism."""
        self._failed_sizes.clear()
        self._next_micro_batch = self._smallest_micro_batch

    def _is_refused(self, outcome: Outcome) -> bool:
        """Return whether DeepSpeed itself raised the error, and the user's stage is 0.

        Stage 0 forbids some calls that other stages allow, such as `loss.backward()` instead of
        `engine.backward(loss)`.
        """
        is_in_deepspeed = "/deepspeed/" in _last_frame(outcome.detail)
        return read_strategy(self._plan.base_config).stage == 0 and is_in_deepspeed

    @property
    def _smallest_micro_batch(self) -> int:
        if self._plan.train_batch_size is not None:
            return max(self._plan.divisible_by, self._plan.min_micro_batch)
        return self._plan.allowed_micro_batches[0]

    def _overrides(self, micro_batch: int) -> dict[str, Any]:
        """Return the overrides of a profile trial in the current strategy and parallelism."""
        user_strategy = read_strategy(self._plan.base_config)
        strategy = self._strategies[0] if self._strategies else user_strategy
        return strategies.profile_overrides(self._plan, strategy, micro_batch, self._divisions[0])


def name_of_trial(trial: Trial) -> str:
    """Return how messages call one of the first trials."""
    is_own = trial.kind is TrialKind.BASELINE
    return "your own configuration" if is_own else "the profile trial"


def _is_of_script(trial: Trial, outcome: Outcome) -> bool:
    """Return whether the script failed for a reason other than the configuration.

    This is so if the script failed before `deepspeed.initialize`, or if its own code raised the
    error after whole optimizer steps with the user's own configuration.
    """
    if outcome.before_engine:
        return True
    frame = _last_frame(outcome.detail)
    has_trained = trial.kind is TrialKind.BASELINE and outcome.completed_steps > 0
    is_in_library = any(part in frame for part in _IN_LIBRARY)
    # CUDA reports a kernel's error only where the script later waits for the device.
    is_device_error = "CUDA error" in outcome.message
    return has_trained and bool(frame) and not (is_in_library or is_device_error)


def _last_frame(traceback: str) -> str:
    """Return the line of a traceback that names where the error was raised; empty without one."""
    frames = [line for line in traceback.splitlines() if line.startswith('  File "')]
    return frames[-1] if frames else ""
