"""Contract of every engine: tests that the test class of an engine inherits."""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator

import pytest

from dsat.engines import Engine
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind


class Behaviour(str, enum.Enum):
    """What a trial of the contract does."""

    RUNS = "runs"
    EXHAUSTS_MEMORY = "exhausts memory"
    CRASHES = "crashes"
    HANGS = "hangs"


class EngineContract(abc.ABC):
    """Inherit this in a class that pytest collects, and implement `make`.

    Attributes:
        patience_s: the longest duration of a trial that does not hang.
        slots_per_trial: slots of each trial, in all engines that `make` returns.
        trials_at_once: the most trials that the engine runs at the same time; 1 or 2.
        first_id: added to the trial ids of a test, so that several tests can share an engine.
    """

    patience_s = 600.0
    slots_per_trial = 1
    trials_at_once = 2
    first_id = 0

    @abc.abstractmethod
    def make(self, num_slots: int) -> Engine:
        """Make an engine that can run the trials of `trial`."""

    def trial(self, trial_id: int, behaviour: Behaviour = Behaviour.RUNS) -> Trial:
        """Make a trial with this behaviour, which its `overrides` state."""
        return Trial(
            id=self.first_id + trial_id,
            kind=TrialKind.SEARCH,
            name=f"{behaviour.name.lower()}_{self.first_id + trial_id}",
            stage=1,
            batch=BatchTriple(2 * self.slots_per_trial, 2, 1),
            overrides={"behaviour": behaviour.value},
            flops_per_sample=1e6,
        )

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        engine = self.make(self.trials_at_once * self.slots_per_trial)
        yield engine
        engine.close()

    def fill(self, engine: Engine) -> None:
        """Launch hanging trials until the engine has no room for another."""
        for number in range(1, self.trials_at_once + 1):
            engine.launch(self.trial(number, Behaviour.HANGS))

    def ended(self, engine: Engine, count: int) -> list[tuple[int, Outcome]]:
        """Return the next `count` outcomes, in the order in which `poll` reports them."""
        told: list[tuple[int, Outcome]] = []
        for _ in range(count):
            told += engine.poll(self.patience_s)
            if len(told) >= count:
                break
        assert len(told) == count, told
        return [(trial_id - self.first_id, outcome) for trial_id, outcome in told]

    def test_says_how_many_slots_it_has(self, engine: Engine) -> None:
        assert engine.num_slots == self.trials_at_once * self.slots_per_trial

    @pytest.mark.parametrize(
        ("behaviour", "kind"),
        [
            (Behaviour.RUNS, OutcomeKind.OK),
            (Behaviour.EXHAUSTS_MEMORY, OutcomeKind.OOM),
            (Behaviour.CRASHES, OutcomeKind.ERROR),
        ],
    )
    def test_tells_once_how_a_trial_ended(
        self, engine: Engine, behaviour: Behaviour, kind: OutcomeKind
    ) -> None:
        engine.launch(self.trial(3, behaviour))
        [(trial_id, outcome)] = self.ended(engine, 1)
        assert (trial_id, outcome.kind) == (3, kind)
        assert (outcome.metrics is not None) == (kind is OutcomeKind.OK)
        assert outcome.ok or outcome.message
        assert outcome.duration_s > 0
        assert engine.poll(0) == []

    def test_gives_the_slots_of_a_trial_that_ended_to_others(self, engine: Engine) -> None:
        if self.trials_at_once > 1:
            engine.launch(self.trial(1, Behaviour.HANGS))  # runs during all others
        told = []
        for trial_id in (2, 3):  # successful ones: a failed trial might run again, alone
            engine.launch(self.trial(trial_id))
            told += [ended for ended, _ in self.ended(engine, 1)]
        assert told == [2, 3]

    def test_tells_nothing_after_it_was_closed(self, engine: Engine) -> None:
        self.fill(engine)
        engine.close()
        assert engine.poll(0.05) == []
        engine.close()

    def test_tells_nothing_when_nothing_ends_in_time(self, engine: Engine) -> None:
        assert engine.poll(0) == []
        assert engine.poll(0.05) == []
        engine.launch(self.trial(1, Behaviour.HANGS))
        assert engine.poll(0.05) == []
