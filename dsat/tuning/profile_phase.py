"""Profiles the model, in the first strategy in which it fits."""

from __future__ import annotations

from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.tuning import strategies
from dsat.tuning.phase import Phase, TrialFactory
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from dsat.values.zero_strategy import of_config


class ProfilePhase(Phase):
    """Trials with the smallest micro batch, one after the other, until one of them ran.

    Args:
        plan: what is tuned.
        trials: makes its trials.

    Attributes:
        profile: of the model, once it is known.
        failure: why it cannot be profiled, once that is known.
    """

    def __init__(self, plan: Plan, trials: TrialFactory) -> None:
        self.profile: ModelProfile | None = None
        self.failure: str | None = None
        self._plan = plan
        self._trials = trials
        self._ladder = strategies.rungs(plan)
        self._rung = -1  # of the ladder; -1: the user's own strategy
        self._next_micro_batch: int | None = self._smallest_micro_batch

    @property
    def climbed(self) -> bool:
        """Whether the user's own strategy does not fit."""
        return self._rung >= 0

    @property
    def over(self) -> bool:
        """Whether the model is profiled."""
        return self.profile is not None

    @property
    def space(self) -> Space:
        """What is to be searched, once the model is profiled."""
        assert self.profile is not None
        return strategies.make_space(self._plan, self.profile, rung=self._rung)

    def next_trial(self) -> Trial | None:
        micro_batch, self._next_micro_batch = self._next_micro_batch, None
        return None if micro_batch is None else self._trial(micro_batch)

    def hear(self, trial: Trial, outcome: Outcome) -> None:
        profile = outcome.profile
        if not outcome.ok or profile is None:
            self._hear_failure(trial, outcome)
        elif self._plan.metric == "FLOPS_per_gpu" and not profile.flops_per_sample:
            self.failure = (
                "the profile trial failed: no FLOPs of the model could be counted (custom "
                "kernels?). Use --metric throughput"
            )
        elif (
            self._plan.metric == "tokens_per_second" and outcome.value(self._plan.objective) is None
        ):
            self.failure = (
                "the profile trial failed: no tokens could be counted, because the model's inputs "
                "have no integer tensor of batch x length. Use --metric throughput"
            )
        else:
            self.profile = profile

    def _hear_failure(self, trial: Trial, outcome: Outcome) -> None:
        """Profiles again in another way, or gives up."""
        smallest, own = self._smallest_micro_batch, self._plan.own_batch.micro_batch
        if outcome.kind is OutcomeKind.ERROR and trial.batch.micro_batch == smallest != own:
            # Some models cannot train on so few samples (batch normalisation, say).
            self._next_micro_batch = own
            return
        on_the_ladder = self.climbed and outcome.kind is OutcomeKind.ERROR
        if (outcome.kind.is_out_of_memory or on_the_ladder) and self._rung + 1 < len(self._ladder):
            self._rung += 1
            self._next_micro_batch = smallest
            return
        self.failure = outcome.said_of("the profile trial")

    @property
    def _smallest_micro_batch(self) -> int:
        if self._plan.train_batch_size is not None:
            return max(self._plan.divisible_by, self._plan.min_micro_batch)
        return self._plan.allowed_micro_batches[0]

    def _trial(self, micro_batch: int) -> Trial:
        plan = self._plan
        strategy = self._ladder[self._rung] if self.climbed else of_config(plan.base_config)
        overrides = strategies.profile_overrides(plan, strategy, micro_batch)
        batch = BatchTriple(micro_batch * plan.slots_per_trial, micro_batch, 1)
        return self._trials.make(TrialKind.PROFILE, overrides, batch, plan.switches)
