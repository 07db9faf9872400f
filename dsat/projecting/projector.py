"""`dsat project`: predict the speed and memory of a training on a given type of GPU.

One simulated step of each strategy shows which kernels and collectives run. The table of GPUs
(`dsat.search.gpus`) and the search's physical model (`dsat.search.step_time`) give their durations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dsat.command import ds_config
from dsat.command.value_lists import split
from dsat.errors import UserInputError
from dsat.prepare.simulated_model import simulate
from dsat.projecting.options import ProjectSettings
from dsat.projecting.projection import Projection, Row
from dsat.projecting.speed import ProjectedSpeed, StepTime
from dsat.projecting.traced_work import Cluster, hardware_of
from dsat.projecting.tracing import SIZES, Traced, trace, worthwhile
from dsat.search import gpus
from dsat.search.gpus import GpuModel
from dsat.search.speed import Points
from dsat.show import past_runs
from dsat.show.past_runs import PastRun
from dsat.values import format as fmt
from dsat.values.outcome import Metrics
from dsat.values.parallelism import read_parallelism
from dsat.values.trial import Trial, TrialKind
from dsat.values.zero_strategy import Strategy, read_strategy

_LARGEST_MICRO_BATCH = 512
# A run trains the same model if the numbers of parameters differ by at most this fraction, and the
# FLOPs of a sample by less than this factor (samples of real data have many lengths).
_SAME_MODEL, _SAME_SAMPLES = 0.02, 1.5
# Configurations with at least this fraction of the best throughput count as equally fast. Of
# these, the smallest micro batch and the lowest stage come first.
_NEARLY = 0.98
_BEST = 3  # strategies to show for each number of GPUs


def project(settings: ProjectSettings) -> Projection:
    """Predict the training of a script, or of a model's configuration, on a given type of GPU.

    Raises:
        UserInputError: the settings, the files or the run are wrong.
        DsatError: the script or every strategy cannot be simulated, or the journal is damaged.
    """
    past = None if settings.from_run is None else past_runs.load(settings.from_run)
    if past is not None:
        gpu_of(past)  # refuses a run on CPU cores before anything is simulated
    count, name = settings.to
    gpu = gpus.find(name)

    def choose(traced: Traced) -> list[Strategy]:
        _check_slots(traced, count)
        measured_ones = [] if past is None else [s for s, *_ in measured(past, traced)]
        return [*measured_ones, *worthwhile(traced, gpu, count, always=settings.has_own)]

    with simulate(settings) as model:
        trials = [] if past is None else past.run.trials.values()
        accumulates = any(trial.batch.gas > 1 for trial in trials)
        other_settings = {k: v for k, v in model.config.items() if k not in ds_config.BATCH_KEYS}
        sizes = _batch_sizes(settings, model.config)
        model = replace(model, config={**other_settings, **sizes})
        traced = trace(model, count, choose, accumulates=accumulates)
    network = None if settings.network is None else 1e9 / 8 * settings.network
    projector = Projector(traced, gpu, network)
    if past is not None:
        projector.calibrate(past)
    return replace(projector.projection(model.name, settings), dtype=model.dtype)


def gpu_of(past: PastRun) -> GpuModel:
    """Return the type of GPU on which a run was measured.

    Raises:
        UserInputError: it was measured on CPU cores, or on an unknown GPU.
    """
    run, machine = past.run, str(past.run.info.get("machine", ""))
    if "CPU core" in machine or "cpu slot" in machine:  # "cpu slot" in runs of the last release
        problem = "was measured on CPU cores, so it cannot correct predictions for GPUs"
        raise UserInputError(problem, where=str(past.folder))
    device = (run.profile.device_name if run.profile else "") or machine
    return gpus.find_by_device_name(device) or gpus.find(device)


def _batch_sizes(settings: ProjectSettings, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the batch sizes that the user gave.

    With `--model`, `config` contains a micro batch of 1 that dsat added, so the user's own file is
    read again. `--train-batch-size` replaces all sizes, except the first of micro batch and
    accumulation steps that divides it.
    """
    if settings.model is not None:
        path = settings.ds_config
        config = {} if path is None else split(ds_config.read(path), where=str(path))[0]
    sizes = {key: config[key] for key in ds_config.BATCH_KEYS if isinstance(config.get(key), int)}
    batch = settings.train_batch_size
    if batch is None:
        return sizes
    total, *divisors = ds_config.BATCH_KEYS
    shared = read_parallelism(config)
    groups = shared.data(settings.to[0])
    divides = (key for key in divisors if key in sizes and batch % (groups * sizes[key]) == 0)
    other_size = {key: sizes[key] for key in itertools.islice(divides, 1)}
    return {total: batch * shared.tensor, **other_size}  # AutoTP divides it; see `resolve_batch`


def _check_slots(traced: Traced, count: int) -> None:
    """Raise UserInputError if this number of GPUs cannot run the user's configuration."""
    shared = traced.parallelism.shared
    if count % shared:
        raise UserInputError(
            f"{fmt.count(count, 'GPU')}: not a multiple of {shared}, the GPUs that share a sample "
            "in your configuration (autotp_size, sequence_parallel_size)",
            where="--to",
        )
    ds_config.check_groups(traced.base, count, where="--to")
    if not traced.gas(count, 1):
        total = traced.global_batch(count)
        raise UserInputError(
            f"{count} GPUs cannot share your global batch of {total} samples evenly",
            where="--to",
            hint="Choose another number of GPUs, or change train_batch_size.",
        )


def measured(past: PastRun, traced: Traced) -> list[tuple[Strategy, Trial, Metrics]]:
    """Return strategy, trial and metrics of each trial whose model and switches are unchanged.

    Raises:
        UserInputError: the run has another model or sample length, or no such trial.
    """
    run, where = past.run, str(past.folder)
    profile, facts, flops = run.profile, traced.facts, traced.model.model_flops_per_sample
    if profile is not None:
        kinds = {"num_params": "parameters", "trainable_params": "trained parameters"}
        for name, kind in kinds.items():
            count, ours = getattr(profile, name), getattr(facts, name)
            if abs(count - ours) > _SAME_MODEL * ours:
                raise UserInputError(
                    f"is a run of another model: {count:,} {kind} instead of {ours:,}",
                    where=where,
                    hint="Name another run, or leave out --from.",
                )
        if not flops / _SAME_SAMPLES < profile.flops_per_sample < flops * _SAME_SAMPLES:
            raise UserInputError(
                f"its samples take {profile.flops_per_sample:.2e} FLOPs, but yours "
                f"{flops:.2e}, so their lengths differ",
                where=where,
                hint="Set the length with --seq-length, if you use --model.",
            )
    trials = []
    for trial in run.trials.values():
        outcome, config = run.outcomes.get(trial.id), run.plan.config(trial.overrides)
        if outcome is None or not outcome.ok or outcome.metrics is None:
            continue
        if trial.kind is TrialKind.PROFILE or read_parallelism(config) != traced.parallelism:
            continue
        if all(run.plan.switches.get(name) == value for name, value in trial.script_args.items()):
            trials.append((read_strategy(config), trial, outcome.metrics))
    if not trials:
        raise UserInputError(
            "has no measured trial of your present model",
            where=where,
            hint="Name another run, or leave out --from.",
        )
    return trials


class Projector:
    """Predictor of the speed of one traced model on one type of GPU."""

    def __init__(self, traced: Traced, gpu: GpuModel, network: float | None) -> None:
        self._traced, self._gpu, self._network = traced, gpu, network
        hardware = hardware_of(gpu)
        self.speed = ProjectedSpeed(hardware, list(traced.traces))
        self._calibrated_by = 0

    def calibrate(self, past: PastRun) -> None:
        """Correct all predictions by the trials of a run of the same model.

        Raises:
            UserInputError: the run is of another model, or none of its trials can be used.
        """
        run, traced, slots = past.run, self._traced, past.run.plan.slots_per_trial
        gpu = gpu_of(past)
        network = gpu.network_bandwidth
        if self._network is not None and gpu == self._gpu:
            network = self._network  # --network describes the run's hosts too
        cluster = Cluster(gpu, slots, run.plan.slots_per_host or slots, network)
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
                "none of its measured strategies can be simulated",
                where=str(past.folder),
                hint="Name another run, or leave out --from.",
            )
        self.speed = self.speed.calibrated(
            hardware_of(gpu), Points.join(points), np.array(log_s), np.array(errors)
        )
        self._calibrated_by = len(points)

    def projection(self, title: str, settings: ProjectSettings) -> Projection:
        """Return the projection for the number of GPUs in `settings` and all of `SIZES`."""
        traced, (count, _) = self._traced, settings.to
        sizes = sorted({count, *SIZES})
        own_sizes = sizes if settings.has_own else ()
        own_rows = [self.row(traced.own, n, traced.own_micro_batch(n)) for n in own_sizes]
        best = {n: self._best(n) for n in sizes}
        return Projection(
            name=title,
            gpu=self._gpu,
            count=count,
            network_bandwidth=self._cluster(count).network_bandwidth,
            parameters=traced.facts.num_params,
            sequence_length=traced.sequence_length,
            trained=traced.facts.trainable_params,
            recomputes=settings.activation_checkpointing or ("off" if settings.model else None),
            own=tuple(row for row in own_rows if row is not None),
            best={n: rows for n, rows in best.items() if rows},
            failures=traced.failures,
            calibrated_by=self._calibrated_by,
            tokens=settings.tokens,
            price=settings.price,
            batch_is_default=not traced.has_batch,
        )

    def _best(self, slots: int) -> tuple[Row, ...]:
        """Return up to `_BEST` strategies that fit, fastest first, each at its best micro batch."""
        traced, candidates = self._traced, []
        samples = traced.global_batch(slots) // traced.parallelism.data(slots)
        sizes = [m for m in range(1, min(samples, _LARGEST_MICRO_BATCH) + 1) if samples % m == 0]
        for strategy in traced.traces:
            rows = [
                row for row in (self.row(strategy, slots, m) for m in sizes) if row and row.fits
            ]
            if rows:
                most = max(row.samples_per_second for row in rows)
                candidates.append(next(r for r in rows if r.samples_per_second >= _NEARLY * most))
        most = max((row.samples_per_second for row in candidates), default=0.0)

        def order(row: Row) -> tuple[bool, float]:
            is_near = row.samples_per_second >= _NEARLY * most
            return not is_near, row.strategy.stage if is_near else -row.samples_per_second

        return tuple(sorted(candidates, key=order)[:_BEST])

    def row(self, strategy: Strategy, slots: int, micro_batch: int) -> Row | None:
        """Predict one configuration; None if it was not simulated or `slots` does not suit it."""
        traced = self._traced
        gas, parallelism = traced.gas(slots, micro_batch), traced.parallelism
        if strategy not in traced.traces or gas < 1 or slots % parallelism.shared:
            return None
        if not ds_config.secondary_divides(traced.base, slots, strategy.stage):
            return None
        memory_bytes, fits = traced.memory(strategy, slots, micro_batch, self._gpu)
        time = self.step_time(strategy, slots, micro_batch, gas)
        samples = parallelism.data(slots) * micro_batch * gas / time.seconds
        peak = self._gpu.peak(traced.model.itemsize)
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
        return Cluster.of(self._gpu, slots, self._network)
