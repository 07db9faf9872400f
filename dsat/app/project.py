"""`dsat project`: what training will do on cards of a named kind, before anybody rents them.

One simulated step of each strategy gives its kernels and collectives; their seconds follow from the
table of cards (`dsat.inputs.cards`) and the physical model of the search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsat.app import estimate as estimates
from dsat.app import past_runs, probe
from dsat.app.past_runs import PastRun
from dsat.errors import DsatError, UserInputError
from dsat.inputs import cards, ds_config, hf_config
from dsat.inputs.cards import Card
from dsat.inputs.project_settings import ProjectSettings
from dsat.memory.closed_form import ModelFacts
from dsat.memory.config_facts import HOW_TO_SIMULATE
from dsat.memory.estimate import MemoryEstimate
from dsat.memory.predictor import Anchor, Basis, MemoryModel, Variant
from dsat.memory.simulation_client import Question, Simulator
from dsat.report.projection import Projection, Row
from dsat.search.normal import Array
from dsat.search.projected_speed import ProjectedSpeed, StepTime
from dsat.search.speed import Points
from dsat.search.traced_work import Cluster, hardware_of, scaled, work_of
from dsat.values.parallelism import Parallelism
from dsat.values.parallelism import of_config as parallelism_of
from dsat.values.step_trace import ModelTrace, StepTrace
from dsat.values.trial import TrialKind
from dsat.values.zero_strategy import NONE, Strategy, of_config

_SIZES = tuple(2**n for n in range(10))  # 1 to 512 cards
_LEAST_TRACED = 8  # slots: collectives of fewer say nothing of more
_MOST_MICRO_BATCH = 512
_NEARLY = 0.98  # of the best throughput; of those the smallest micro batch is taken
_BEST = 3  # strategies that are shown for each size


@dataclass(frozen=True)
class Traced:
    """A script's model and strategies, as simulated.

    Attributes:
        base: the user's DeepSpeed configuration.
        model: the passes of the model by itself.
        traces: a step of each strategy, and its memory.
        failures: why strategies could not be simulated, by their labels.
        sequence_length: tokens of a sample; None if samples are no sequences.
    """

    base: Mapping[str, Any]
    facts: ModelFacts
    model: ModelTrace
    traces: Mapping[Strategy, tuple[StepTrace, MemoryEstimate]]
    failures: Mapping[str, str]
    sequence_length: int | None

    @property
    def own(self) -> Strategy:
        """Strategy of the user's configuration."""
        return of_config(self.base)

    @property
    def own_micro_batch(self) -> int:
        """Micro batch of the user's configuration; 1 where it leaves that open."""
        given = self.base.get(ds_config.BATCH_KEYS[1])
        return given if isinstance(given, int) else 1

    @property
    def parallelism(self) -> Parallelism:
        """Slots that share a sample by the user's configuration."""
        return parallelism_of(self.base)

    def gas(self, slots: int, micro_batch: int) -> int:
        """Return the accumulation steps that keep the user's global batch size, if one is given.

        0 if the slots need a larger one.
        """
        total, _, gas = (self.base.get(key) for key in ds_config.BATCH_KEYS)
        if isinstance(total, int):
            return total // (self.parallelism.data(slots) * micro_batch)
        return gas if isinstance(gas, int) else 1

    def config(self, strategy: Strategy, slots: int) -> dict[str, Any]:
        """Return the configuration of a strategy, without batch sizes."""
        if strategy == self.own:
            own = ds_config.for_use(self.base)
            return {key: value for key, value in own.items() if "batch_size" not in key}
        return estimates.configuration(self.base, strategy, slots)

    def work(self, strategy: Strategy, micro_batch: int, cluster: Cluster) -> Array:
        """Count what a strategy does on a cluster; see `traced_work.work_of`."""
        step, _ = self.traces[strategy]
        of_slots = scaled(step, cluster.slots, sharded=strategy.stage > 0)
        return work_of(of_slots, self.model, micro_batch, cluster, self.parallelism.shared)

    def memory(self, strategy: Strategy, slots: int, card: Card) -> _Memory:
        """Return what a strategy needs of a card's memory on so many slots."""
        config = self.config(strategy, slots)
        anchors: tuple[Anchor, ...] = ()
        if strategy in self.traces and self.traces[strategy][0].slots == slots:
            step, found = self.traces[strategy]
            anchors = (Anchor(config, step.micro_batch, found),)
        basis = Basis((Variant({}, self.facts, anchors),))
        model = MemoryModel(basis, slots=slots, limit_bytes=card.memory_bytes, on_device=True)
        return _Memory(model, config)


class _Memory:
    """Memory of one strategy on one number of slots."""

    def __init__(self, model: MemoryModel, config: Mapping[str, Any]) -> None:
        self._model, self._shape = model, model.shape(config, {})
        self.largest = int(min(model.largest(self._shape), _MOST_MICRO_BATCH))

    def bytes(self, micro_batch: int) -> int:
        """Return the predicted peak."""
        return self._model.predicted_bytes(self._shape, micro_batch)


def project(settings: ProjectSettings) -> Projection:
    """Project a script's or a configuration's training to other cards.

    Raises:
        UserInputError: something of the settings or the files is wrong.
        DsatError: the script cannot be simulated.
    """
    count, name = settings.to
    card = probe.card_here(count) if name == probe.HERE else cards.find(name, settings.cards)
    _check_packages(settings)
    with estimates.simulator_of(settings, as_cpu=card.is_cpu) as (title, base, simulator):
        always = settings.hf_config is None or settings.ds_config is not None
        traced = trace(
            base, simulator, count, lambda found: _worthwhile(found, card, count, always=always)
        )
    network = None if settings.network is None else 1e9 / 8 * settings.network
    projector = Projector(traced, card, network)
    if settings.from_run is not None:
        projector.calibrate(past_runs.load(settings.from_run), settings.cards)
    return projector.projection(title, settings)


def _check_packages(settings: ProjectSettings) -> None:
    missing = hf_config.missing_packages() if settings.hf_config is not None else []
    if missing:
        raise UserInputError(
            f"needs a simulation, and {', '.join(missing)} is not installed",
            where="--hf-config",
            hint=HOW_TO_SIMULATE,
        )


def trace(
    base: Mapping[str, Any],
    simulator: Simulator,
    slots: int,
    choose: Callable[[Traced], Sequence[Strategy]],
) -> Traced:
    """Simulate one step of the user's configuration and of other strategies.

    Args:
        base: the user's DeepSpeed configuration.
        simulator: of the script.
        slots: about which is asked.
        choose: returns the strategies, by what is known of the model before.

    Raises:
        SimulationUnavailable: the script cannot be simulated.
        DsatError: no strategy can be.
    """
    slots = max(slots, _LEAST_TRACED)
    facts, model = simulator.traced_facts(base)
    found = Traced(base, facts, model, {}, {}, simulator.sequence_length)
    strategies = choose(found)
    # Later micro steps of a step are like the first of two.
    accumulates = any(found.gas(n, 1) > 1 for n in (*_SIZES, slots))
    gas = {ds_config.BATCH_KEYS[2]: 2 if accumulates else 1}
    questions = [Question({**found.config(s, slots), **gas}, 1, slots) for s in strategies]
    answers = dict(zip(strategies, simulator.traces(questions), strict=True))
    failures = {s.label: answer for s, answer in answers.items() if isinstance(answer, str)}
    traces = {
        s: (answer[1], answer[0]) for s, answer in answers.items() if not isinstance(answer, str)
    }
    if not traces:
        raise DsatError(f"no strategy can be simulated: {next(iter(failures.values()))}")
    return replace(found, traces=traces, failures=failures)


def _worthwhile(found: Traced, card: Card, count: int, *, always: bool) -> list[Strategy]:
    """Return the strategies to simulate, by formula: a simulation takes seconds for each.

    Those that some number of cards holds; with offloading only where no other one fits the cards
    that are asked about, since it is slower.

    Args:
        found: what is known of the model.
        card, count: that are asked about.
        always: whether they hold it or not, the user's own is among them.
    """

    def fits(rung: Strategy, sizes: Sequence[int]) -> bool:
        return any(found.memory(rung, slots, card).largest >= 1 for slots in sizes)

    rungs = [rung for rung in estimates.ladder(found.base) if fits(rung, _SIZES)]
    plain = [rung for rung in rungs if NONE == rung.offload_optimizer == rung.offload_param]
    chosen = plain if any(fits(rung, [count]) for rung in plain) else rungs
    own = [found.own] if always or fits(found.own, _SIZES) or not chosen else []
    return list(dict.fromkeys([*own, *chosen]))


class Projector:
    """Projections of one traced script to one kind of card."""

    def __init__(self, traced: Traced, card: Card, network: float | None) -> None:
        self._traced, self._card, self._network = traced, card, network
        hardware = hardware_of(card)
        self.speed = ProjectedSpeed(hardware, list(traced.traces))
        self._calibrated_by = 0

    def calibrate(self, past: PastRun, own_cards: Path | None = None) -> None:
        """Correct all predictions by the trials of a run of the same script.

        Args:
            past: the run.
            own_cards: the user's file of cards.

        Raises:
            UserInputError: none of its trials is of use here.
        """
        run, traced = past.run, self._traced
        assert run.plan is not None
        slots, machine = run.plan.slots_per_trial, str(run.info.get("machine", ""))
        if "cpu slot" in machine:
            card = probe.card_here(slots)
        else:
            named = run.profile.device_name if run.profile else ""
            card = cards.find(named or machine, own_cards)
        points, log_s, errors = [], [], []
        for trial in run.trials.values():
            outcome = run.outcomes.get(trial.id)
            strategy = of_config(run.plan.config(trial.overrides))
            if outcome is None or not outcome.ok or outcome.metrics is None:
                continue
            if strategy not in traced.traces or trial.kind is TrialKind.PROFILE:
                continue
            batch = trial.batch
            work = traced.work(strategy, batch.micro_batch, Cluster.of(card, slots))
            points.append(self.speed.points(work, strategy, batch.micro_batch, batch.gas))
            log_s.append(math.log(outcome.metrics.latency / 1000))
            errors.append(outcome.metrics.standard_error)
        if not points:
            raise UserInputError("has no measured trial of this script", where=str(past.folder))
        self.speed = self.speed.calibrated(
            hardware_of(card), Points.of(points), np.array(log_s), np.array(errors)
        )
        self._calibrated_by = len(points)

    def projection(self, title: str, settings: ProjectSettings) -> Projection:
        """Return the answers."""
        traced, (count, _) = self._traced, settings.to
        is_here = settings.to[1] == probe.HERE  # measured with so many slots, and no network
        sizes = sorted({count, *(n for n in _SIZES if n <= count or not is_here)})
        own = [self._own(n) for n in sizes] if traced.own in traced.traces else []
        best = {n: self._best(n) for n in sizes}
        return Projection(
            name=title,
            card=self._card,
            count=count,
            network_bandwidth=self._cluster(count).network_bandwidth,
            parameters=traced.facts.num_params,
            sequence_length=traced.sequence_length,
            own=tuple(row for row in own if row is not None),
            best={n: rows for n, rows in best.items() if rows},
            failures=traced.failures,
            calibrated_by=self._calibrated_by,
            tokens=settings.tokens,
            price=settings.price,
        )

    def _own(self, slots: int) -> Row | None:
        traced = self._traced
        return self.row(traced.own, slots, traced.own_micro_batch)

    def _best(self, slots: int) -> tuple[Row, ...]:
        """Return the fastest strategies that fit, each at its best micro batch."""
        found = []
        for strategy in self._traced.traces:
            rows = list(self._rows(strategy, slots))
            if rows:
                most = max(row.samples_per_second for row in rows)
                found.append(next(r for r in rows if r.samples_per_second >= _NEARLY * most))
        found.sort(key=lambda row: -row.samples_per_second)
        return tuple(found[:_BEST])

    def _rows(self, strategy: Strategy, slots: int) -> Iterator[Row]:
        largest = self._traced.memory(strategy, slots, self._card).largest
        powers = itertools.takewhile(lambda m: m <= largest, (2**n for n in range(10)))
        own = self._traced.own_micro_batch
        for micro_batch in sorted({*powers, *([own] if own <= largest else [])}):
            row = self.row(strategy, slots, micro_batch)
            if row is not None:
                yield row

    def row(self, strategy: Strategy, slots: int, micro_batch: int) -> Row | None:
        """Project one configuration; None if the slots cannot share the global batch size."""
        traced = self._traced
        gas, parallelism = traced.gas(slots, micro_batch), traced.parallelism
        if gas < 1 or slots % parallelism.shared:
            return None
        memory = traced.memory(strategy, slots, self._card)
        time = self.step_time(strategy, slots, micro_batch, gas)
        samples = parallelism.data(slots) * micro_batch * gas / time.seconds
        peak = self._card.peak(traced.facts.param_bytes)
        return Row(
            strategy=strategy,
            slots=slots,
            micro_batch=micro_batch,
            gas=gas,
            time=time,
            memory_bytes=memory.bytes(micro_batch),
            fits=micro_batch <= memory.largest,
            samples_per_second=samples,
            mfu=samples * traced.model.model_flops_per_sample / (slots * peak),
        )

    def step_time(self, strategy: Strategy, slots: int, micro_batch: int, gas: int) -> StepTime:
        """Predict one optimizer step."""
        work = self._traced.work(strategy, micro_batch, self._cluster(slots))
        return self.speed.predict(self.speed.points(work, strategy, micro_batch, gas))

    def _cluster(self, slots: int) -> Cluster:
        return Cluster.of(self._card, slots, self._network)
