"""Contract of every engine, as tests that each engine's own test class inherits."""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator

import pytest

from dsat.engines import Engine
from dsat.errors import EngineError
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind


class Behaviour(str, enum.Enum):
    """Behaviour of a trial of the contract."""

    RUNS = "runs"
    EXHAUSTS_MEMORY = "exhausts memory"
    CRASHES = "crashes"
    HANGS = "hangs"


class EngineContract(abc.ABC):
    """Inherit this in a class that pytest collects, and implement `make`.

    Attributes:
        patience_s: the longest that a trial which does not hang may take.
        slots_per_trial: of every trial of the engines made.
        first_id: added to the trial ids of a test, so that several can share an engine.
    """

    patience_s = 600.0
    slots_per_trial = 1
    first_id = 0

    @abc.abstractmethod
    def make(self, num_slots: int) -> Engine:
        """An engine that runs what `trial` returns."""

    def trial(self, trial_id: int, behaviour: Behaviour = Behaviour.RUNS) -> Trial:
        """A trial that behaves so; an engine finds the behaviour in `overrides`."""
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
        engine = self.make(2 * self.slots_per_trial)
        yield engine
        engine.close()

    def ended(self, engine: Engine, count: int) -> list[tuple[int, Outcome]]:
        """The next `count` outcomes, in the order in which they are told."""
        told: list[tuple[int, Outcome]] = []
        for _ in range(count):
            told += engine.poll(self.patience_s)
            if len(told) >= count:
                break
        assert len(told) == count, told
        return [(trial_id - self.first_id, outcome) for trial_id, outcome in told]

    def test_says_how_many_slots_it_has(self, engine: Engine) -> None:
        assert engine.num_slots == 2 * self.slots_per_trial

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

    def test_runs_trials_side_by_side_and_gives_their_slots_to_others(self, engine: Engine) -> None:
        engine.launch(self.trial(1, Behaviour.HANGS))
        told = []
        for trial_id in (2, 3):  # one that failed here might be run again, alone
            engine.launch(self.trial(trial_id))
            told += [ended for ended, _ in self.ended(engine, 1)]
        assert told == [2, 3]

    def test_cancels_one_trial_and_leaves_the_others(self, engine: Engine) -> None:
        engine.launch(self.trial(1, Behaviour.HANGS))
        engine.launch(self.trial(2, Behaviour.HANGS))
        engine.cancel(self.first_id + 1)
        engine.cancel(self.first_id + 1)
        [(trial_id, outcome)] = self.ended(engine, 1)
        assert (trial_id, outcome.kind) == (1, OutcomeKind.CANCELED)
        assert outcome.metrics is None
        assert engine.poll(0) == []

    def test_tells_nothing_after_it_was_closed(self, engine: Engine) -> None:
        engine.launch(self.trial(1, Behaviour.HANGS))
        engine.launch(self.trial(2))
        engine.close()
        assert engine.poll(0.05) == []
        engine.close()

    def test_does_not_start_a_trial_twice_and_has_nothing_to_cancel_when_it_ended(
        self, engine: Engine
    ) -> None:
        trial = self.trial(1)
        engine.launch(trial)
        engine.launch(trial)
        assert [trial_id for trial_id, _ in self.ended(engine, 1)] == [1]
        engine.launch(trial)
        assert engine.poll(0) == []
        engine.cancel(self.first_id + 1)
        engine.cancel(self.first_id + 77)  # which never began
        assert engine.poll(0) == []
        engine.launch(self.trial(2, Behaviour.HANGS))
        engine.launch(self.trial(3, Behaviour.HANGS))

    def test_refuses_a_trial_without_slots_and_takes_it_later(self, engine: Engine) -> None:
        engine.launch(self.trial(1, Behaviour.HANGS))
        engine.launch(self.trial(2, Behaviour.HANGS))
        with pytest.raises(EngineError):
            engine.launch(self.trial(3))
        engine.cancel(self.first_id + 2)
        assert [trial_id for trial_id, _ in self.ended(engine, 1)] == [2]
        engine.launch(self.trial(3))
        assert [trial_id for trial_id, _ in self.ended(engine, 1)] == [3]

    def test_tells_nothing_when_nothing_ends_in_time(self, engine: Engine) -> None:
        assert engine.poll(0) == []
        assert engine.poll(0.05) == []
        engine.launch(self.trial(1, Behaviour.HANGS))
        assert engine.poll(0.05) == []
