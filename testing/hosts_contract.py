"""The engine contract on hosts of any kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from dsat.engines import Engine
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import Trial
from testing.engine_contract import Behaviour, EngineContract
from testing.local import engine_of


class HostsContract(EngineContract):
    """Inherit this in a class that pytest collects, with a fixture `hosts` of two slots in total.

    Tests share one engine until a test closes it.

    Attributes:
        options: arguments of `testing.local.engine_of`, which choose how ranks are started.
    """

    options: ClassVar[dict[str, Any]] = {}

    _tests = itertools.count(1)

    @pytest.fixture(scope="class")
    @classmethod
    def engines(cls) -> Iterator[list[LocalEngine]]:
        """Yield the list of the class's engines; close them after the last test."""
        made: list[LocalEngine] = []
        yield made
        for engine in made:
            engine.close()

    @pytest.fixture(autouse=True)
    def _on_hosts(self, hosts: Sequence[Host], tmp_path_factory: pytest.TempPathFactory) -> None:
        self.hosts_now = hosts
        self.folder = tmp_path_factory.mktemp("hosts")
        self.first_id = 100 * next(self._tests)

    def make(self, num_slots: int) -> LocalEngine:
        return engine_of("behaviours", self.folder, hosts=self.hosts_now, **self.options)

    @pytest.fixture
    def engine(self, engines: list[LocalEngine]) -> Iterator[LocalEngine]:
        if not engines or engines[-1]._is_closed:
            engines.append(self.make(self.trials_at_once))
        engine = engines[-1]
        yield engine
        for trial_id in list(engine._running):
            engine.cancel(trial_id)
        while engine._running:
            engine.poll(self.patience_s)

    def trial(self, trial_id: int, behaviour: Behaviour = Behaviour.RUNS) -> Trial:
        plain = super().trial(trial_id, behaviour)
        zero = {"zero_optimization": {"stage": plain.stage}}
        return replace(plain, overrides={**plain.batch.config(), **zero, **plain.overrides})

    def test_cancels_one_trial_and_leaves_the_others(self, engine: LocalEngine) -> None:
        self.fill(engine)
        engine.cancel(self.first_id + 1)
        engine.cancel(self.first_id + 77)  # which was never launched
        [(trial_id, outcome)] = self.ended(engine, 1)
        assert (trial_id, outcome.kind) == (1, OutcomeKind.CANCELED)
        assert outcome.metrics is None
        assert engine.poll(0) == []

    def test_tells_nothing_after_it_was_closed(self, engine: Engine) -> None:
        # Defined here so that it runs last: it closes the engine that all tests share.
        super().test_tells_nothing_after_it_was_closed(engine)
