"""`dsat project`: what training will do on cards of a named kind, before anybody rents them.

One simulated step of each strategy gives its kernels and collectives; their seconds follow from the
table of cards (`dsat.inputs.cards`) and the physical model of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsat.app import estimate as estimates
from dsat.command import ds_config
from dsat.errors import DsatError, UserInputError
from dsat.inputs import cards
from dsat.inputs.cards import Card
from dsat.inputs.project_settings import ProjectSettings
from dsat.memory.closed_form import ModelFacts
from dsat.memory.predictor import Anchor, Basis, MemoryModel
from dsat.prepare import probe
from dsat.report.projection import Projection, Row
from dsat.search.normal import Array
from dsat.search.projected_speed import ProjectedSpeed, StepTime
from dsat.search.speed import Points
from dsat.search.traced_work import Cluster, hardware_of, scaled, work_of
from dsat.show import past_runs
from dsat.show.past_runs import PastRun
from dsat.simulation.client import Simulator
from dsat.simulation.protocol import Question
from dsat.values.outcome import Metrics
from dsat.values.parallelism import Parallelism
from dsat.values.parallelism import of_config as parallelism_of
from dsat.values.step_trace import ModelTrace, StepTrace
from dsat.values.trial import Trial, TrialKind
from dsat.values.zero_strategy import NONE, Strategy, of_config

_SIZES = tuple(2**n for n in range(10))  # 1 to 512 cards
_HPZ = "zero_optimization.zero_hpz_partition_size"
_LEAST_TRACED = 8  # slots: collectives of fewer say nothing of more
_MICRO_BATCHES = tuple(2**n for n in range(10))
# By which parameters (a part) and FLOPs of a sample (a factor, since samples of real data have many
# lengths) of a run of the same model may differ.
_SAME_MODEL, _SAME_SAMPLES = 0.02, 1.5
_NEARLY = 0.98  # of the best throughput; the smallest micro batch and stage come first
_BEST = 3  # strategies that are shown for each size


@dataclass(frozen=True)
class Traced:
    """A script's model and strategies, as simulated.

    Attributes:
        base: the user's DeepSpeed configuration.
        model: the passes of the model by itself.
        traces: a step of each strategy, and its memory, from which that of all sizes follows.
        failures: why strategies could not be simulated, by their labels.
        sequence_length: tokens of a sample; None if samples are no sequences.
    """

    base: Mapping[str, Any]
    facts: ModelFacts
    model: ModelTrace
    traces: Mapping[Strategy, tuple[StepTrace, Anchor]]
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

        0 if the slots cannot share it evenly.
        """
        total, _, gas = (self.base.get(key) for key in ds_config.BATCH_KEYS)
        if isinstance(total, int):
            found, left = divmod(total, self.parallelism.data(slots) * micro_batch)
            return 0 if left else found
        return gas if isinstance(gas, int) else 1

    def config(self, strategy: Strategy, slots: int) -> dict[str, Any]:
        """Return the configuration of a strategy, without batch sizes."""
        if strategy == self.own:
            return ds_config.without_batch_sizes(ds_config.for_use(self.base))
        return estimates.configuration(self.base, strategy, slots)

    def work(self, strategy: Strategy, micro_batch: int, cluster: Cluster) -> Array:
        """Count what a strategy does on a cluster; see `traced_work.work_of`."""
        step, _ = self.traces[strategy]
        of_slots = scaled(step, cluster.slots, sharded=strategy.stage > 0)
        stage, parallelism = strategy.stage, self.parallelism
        return work_of(of_slots, self.model, micro_batch, cluster, stage, parallelism)

    def memory(
        self, strategy: Strategy, slots: int, micro_batch: int, card: Card
    ) -> tuple[int, bool]:
        """Return the predicted peak of a card in bytes, and whether it fits with room to spare."""
        gas = {ds_config.BATCH_KEYS[2]: max(1, self.gas(slots, micro_batch))}
        basis = Basis.of_model(self.facts, (anchor for _, anchor in self.traces.values()))
        model = MemoryModel(basis, slots=slots, limit_bytes=card.memory_bytes, on_device=True)
        shape = model.shape({**self.config(strategy, slots), **gas}, {})
        return model.predicted_bytes(shape, micro_batch), model.fits(shape, micro_batch)


def project(settings: ProjectSettings) -> Projection:
    """Project a script's or a configuration's training to other cards."""
    if settings.hf_config is not None:
        estimates.check_packages("--hf-config")
    past = None if settings.from_run is None else past_runs.load(settings.from_run)
    count, name = settings.to
    card = probe.card_here(count) if name == probe.HERE else cards.find(name, settings.cards)

    def chosen(found: Traced) -> list[Strategy]:
        _check_slots(found, count)
        theirs = [] if past is None else [strategy for strategy, *_ in measured(past, found)]
        return [*theirs, *_worthwhile(found, card, count, always=settings.has_own)]

    with estimates.simulator_of(settings, as_cpu=card.is_cpu) as (title, base, simulator):
        trials = [] if past is None else past.run.trials.values()
        accumulated = any(trial.batch.gas > 1 for trial in trials)
        traced = trace(base, simulator, count, chosen, accumulates=accumulated)
    network = None if settings.network is None else 1e9 / 8 * settings.network
    projector = Projector(traced, card, network)
    if past is not None:
        projector.calibrate(past, settings.cards)
    return projector.projection(title, settings)


def _check_slots(traced: Traced, count: int) -> None:
    """Raise UserInputError if so many cards cannot run the user's configuration at all."""
    shared = traced.parallelism.shared
    if count % shared:
        raise UserInputError(
            f"{count} cards are no multiple of the {shared} that share a sample by your "
            "configuration (autotp_size, sequence_parallel_size)",
            where="--to",
        )
    if not traced.gas(count, 1):
        total = traced.base[ds_config.BATCH_KEYS[0]]
        raise UserInputError(
            f"{count} cards cannot share your global batch of {total} samples evenly",
            where="--to",
            hint="Ask about another number of cards, or change train_batch_size.",
        )


def measured(past: PastRun, traced: Traced) -> list[tuple[Strategy, Trial, Metrics]]:
    """Return the trials of a run that measured the user's own model.

    Raises:
        UserInputError: the run is of another model, or has no such trial.
    """
    run, where = past.run, str(past.folder)
    profile, facts, own_flops = run.profile, traced.facts, traced.model.model_flops_per_sample
    if profile is not None:
        kinds = {"num_params": "parameters", "trainable_params": "trained parameters"}
        for name, kind in kinds.items():
            theirs, ours = getattr(profile, name), getattr(facts, name)
            if abs(theirs - ours) > _SAME_MODEL * ours:
                raise UserInputError(
                    f"is a run of another model: {theirs:,} {kind} instead of {ours:,}", where=where
                )
        if not own_flops / _SAME_SAMPLES < profile.flops_per_sample < own_flops * _SAME_SAMPLES:
            raise UserInputError(
                f"its samples take {profile.flops_per_sample:.2e} FLOPs and yours {own_flops:.2e}: "
                "they have another length",
                where=where,
                hint="--seq-length sets that of --hf-config.",
            )
    found = []
    for trial in run.trials.values():
        outcome, config = run.outcomes.get(trial.id), run.plan.config(trial.overrides)
        if outcome is None or not outcome.ok or outcome.metrics is None:
            continue
        if trial.kind is TrialKind.PROFILE or parallelism_of(config) != traced.parallelism:
            continue
        if all(run.plan.switches.get(name) == value for name, value in trial.script_args.items()):
            found.append((of_config(config), trial, outcome.metrics))
    if not found:
        raise UserInputError("has no measured trial of your model as it is now", where=where)
    return found


def trace(
    base: Mapping[str, Any],
    simulator: Simulator,
    slots: int,
    choose: Callable[[Traced], Sequence[Strategy]],
    *,
    accumulates: bool = False,
) -> Traced:
    """Simulate one step of the user's configuration and of other strategies.

    Args:
        slots: about which is asked.
        choose: returns the strategies, by what is known of the model before.
        accumulates: there are trials with several micro steps, whatever the configuration says.

    Raises:
        SimulationUnavailable: the script cannot be simulated.
        DsatError: no strategy can be.
    """
    facts, model = simulator.traced_facts(base)
    found = Traced(base, facts, model, {}, {}, simulator.script.sequence_length)
    # More than those of any group, whose collectives are then told from those of all ranks.
    shared, group = found.parallelism.shared, int(ds_config.at(base, _HPZ) or 1)
    slots = shared * math.ceil(max(slots, _LEAST_TRACED, 2 * shared, 2 * group) / shared)
    strategies = list(dict.fromkeys(choose(found)))
    # Later micro steps of a step are like the first of two.
    accumulates = accumulates or any(found.gas(n, 1) > 1 for n in (*_SIZES, slots))
    gas = {ds_config.BATCH_KEYS[2]: 2 if accumulates else 1}
    questions = [Question({**found.config(s, slots), **gas}, 1, slots) for s in strategies]
    answers = dict(zip(strategies, simulator.traces(questions), strict=True))
    failures = {s.label: answer for s, answer in answers.items() if isinstance(answer, str)}
    traces = {
        s: (answer[1], Anchor(asked.config, asked.micro_batch, answer[0], slots))
        for (s, answer), asked in zip(answers.items(), questions, strict=True)
        if not isinstance(answer, str)
    }
    if not traces:
        raise DsatError(f"no strategy can be simulated: {next(iter(failures.values()))}")
    return replace(found, traces=traces, failures=failures)


def _worthwhile(found: Traced, card: Card, count: int, *, always: bool) -> list[Strategy]:
    """Return the strategies to simulate, by formula: a simulation takes seconds for each.

    Those that some number of cards holds; with offloading only where no other one fits the cards
    that are asked about, since it is slower.

    Args:
        always: whether they hold it or not, the user's own is among them.
    """

    def fits(rung: Strategy, sizes: Sequence[int]) -> bool:
        return any(found.memory(rung, slots, 1, card)[1] for slots in sizes)

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

        Raises:
            UserInputError: none of its trials is of use here.
        """
        run, traced = past.run, self._traced
        slots, machine = run.plan.slots_per_trial, str(run.info.get("machine", ""))
        if "cpu slot" in machine:
            try:
                card = probe.card_here(slots)
            except UserInputError:
                problem = f"was made on {slots} processor cores, and this machine has fewer"
                raise UserInputError(problem, where=str(past.folder)) from None
        else:
            named = run.profile.device_name if run.profile else ""
            card = cards.find(named or machine, own_cards)
        network = card.network_bandwidth
        if self._network is not None and card == self._card:  # the network is theirs, too
            network = self._network
        cluster = Cluster(card, slots, run.plan.slots_per_host or slots, network)
        points, log_s, errors = [], [], []
        for strategy, trial, metrics in measured(past, traced):
            if strategy in traced.traces:
                micro_batch, gas = trial.batch.micro_batch, trial.batch.gas
                work = traced.work(strategy, micro_batch, cluster)
                points.append(self.speed.points(work, strategy, micro_batch, gas))
                log_s.append(math.log(metrics.latency / 1000))
                errors.append(metrics.standard_error)
        if not points:
            raise UserInputError(
                "none of the strategies that it measured can be simulated", where=str(past.folder)
            )
        self.speed = self.speed.calibrated(
            hardware_of(card), Points.of(points), np.array(log_s), np.array(errors)
        )
        self._calibrated_by = len(points)

    def projection(self, title: str, settings: ProjectSettings) -> Projection:
        """Return the answers."""
        traced, (count, _) = self._traced, settings.to
        is_here = settings.to[1] == probe.HERE  # measured with so many slots, and no network
        sizes = sorted({count, *(n for n in _SIZES if n <= count or not is_here)})
        of_own = sizes if settings.has_own else ()
        own = [self.row(traced.own, n, traced.own_micro_batch) for n in of_own]
        best = {n: self._best(n) for n in sizes}
        return Projection(
            name=title,
            card=self._card,
            count=count,
            network_bandwidth=None if is_here else self._cluster(count).network_bandwidth,
            parameters=traced.facts.num_params,
            sequence_length=traced.sequence_length,
            own=tuple(row for row in own if row is not None),
            best={n: rows for n, rows in best.items() if rows},
            failures=traced.failures,
            calibrated_by=self._calibrated_by,
            tokens=settings.tokens,
            price=settings.price,
        )

    def _best(self, slots: int) -> tuple[Row, ...]:
        """Return the fastest strategies that fit, each at its best micro batch."""
        traced, found = self._traced, []
        sizes = sorted({*_MICRO_BATCHES, traced.own_micro_batch})
        for strategy in traced.traces:
            rows = [
                row for row in (self.row(strategy, slots, m) for m in sizes) if row and row.fits
            ]
            if rows:
                most = max(row.samples_per_second for row in rows)
                found.append(next(r for r in rows if r.samples_per_second >= _NEARLY * most))
        most = max((row.samples_per_second for row in found), default=0.0)

        def order(row: Row) -> tuple[bool, float]:
            is_near = row.samples_per_second >= _NEARLY * most
            return not is_near, row.strategy.stage if is_near else -row.samples_per_second

        return tuple(sorted(found, key=order)[:_BEST])

    def row(self, strategy: Strategy, slots: int, micro_batch: int) -> Row | None:
        """Project one configuration; None if it is not simulated or cannot share the batch."""
        traced = self._traced
        gas, parallelism = traced.gas(slots, micro_batch), traced.parallelism
        if strategy not in traced.traces or gas < 1 or slots % parallelism.shared:
            return None
        memory_bytes, fits = traced.memory(strategy, slots, micro_batch, self._card)
        time = self.step_time(strategy, slots, micro_batch, gas)
        samples = parallelism.data(slots) * micro_batch * gas / time.seconds
        peak = self._card.peak(traced.model.itemsize)
        return Row(
            strategy=strategy,
            slots=slots,
            micro_batch=micro_batch,
            gas=gas,
            time=time,
            memory_bytes=memory_bytes,
            fits=fits,
            samples_per_second=samples,
            mfu=samples * traced.model.model_flops_per_sample / (slots * peak),
        )

    def step_time(self, strategy: Strategy, slots: int, micro_batch: int, gas: int) -> StepTime:
        """Predict one optimizer step."""
        work = self._traced.work(strategy, micro_batch, self._cluster(slots))
        return self.speed.predict(self.speed.points(work, strategy, micro_batch, gas))

    def _cluster(self, slots: int) -> Cluster:
        return Cluster.of(self._card, slots, self._network)
