"""Predicted seconds of a traced step: roofline, rings over hosts, calibration."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dsat.projecting.speed import ProjectedSpeed, StepTime
from dsat.projecting.traced_work import PRIORS, Cluster, hardware_of, scaled, work_of
from dsat.search import gpus
from dsat.search.speed import Points
from dsat.search.step_time import COLUMNS
from dsat.values.parallelism import Parallelism
from dsat.values.step_trace import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    HOST,
    MATMUL,
    MEMORY,
    STEP,
    Collectives,
    Kernels,
    ModelTrace,
    StepTrace,
)
from dsat.values.zero_strategy import Strategy

A100 = gpus.find("A100-80GB")
PARAMS, TOKENS = 1e9, 2048
USUAL = math.exp(PRIORS["compute"][0])  # factor over the roofline's time
STAGE_3 = Strategy(3)
CLUSTER = Cluster.of(A100, 8)


def passes(micro_batch: int) -> StepTrace:
    """Return the forward and backward passes of a model that consists of matrix products."""
    flops, moved = 2 * PARAMS * TOKENS * micro_batch / 100, 2e7 * (1 + micro_batch)
    kernels = (
        Kernels(FORWARD, True, MATMUL, 2, flops, moved, 100),
        Kernels(BACKWARD, True, MATMUL, 2, flops, moved, 200),
    )
    return StepTrace(kernels, (), micro_batch, 1, 100, 6 * PARAMS * TOKENS * micro_batch)


MODEL = ModelTrace(passes(256), passes(512))


def step(*collectives: Collectives, slots: int = 8) -> StepTrace:
    optimizer = Kernels(STEP, True, MEMORY, 4, 0.0, 30 * PARAMS / slots, 1)
    return StepTrace((*MODEL.at(1), optimizer), collectives, 1, slots, 100, 6 * PARAMS * TOKENS)


def gathers(*, overlapped: bool = True) -> tuple[Collectives, ...]:
    return tuple(
        Collectives(phase, True, ALL_GATHER, 8, 1, overlapped, 2 * PARAMS, 20)
        for phase in (FORWARD, BACKWARD)
    )


def time_of(trace: StepTrace, slots: int, micro_batch: int = 4) -> StepTime:
    speed = ProjectedSpeed(hardware_of(A100), [STAGE_3])
    whole = scaled(trace, slots, sharded=True)
    work = work_of(whole, MODEL, micro_batch, Cluster.of(A100, slots), 3)
    return speed.predict(speed.points(work, STAGE_3, micro_batch, 1))


def test_kernels_at_any_micro_batch_follow_from_two() -> None:
    assert [k.flops for k in MODEL.at(3)] == pytest.approx([k.flops for k in passes(3).kernels])
    assert [k.bytes for k in MODEL.at(3)] == pytest.approx([k.bytes for k in passes(3).kernels])


def test_a_step_of_matrix_products_takes_its_flops_over_what_the_gpu_reaches() -> None:
    reached = A100.peak(2) * A100.matmul / USUAL
    alone = time_of(step(), 1, micro_batch=16)
    assert alone.parts["kernels"] == pytest.approx(6 * PARAMS * TOKENS * 16 / reached, rel=0.01)
    assert sum(alone.parts.values()) == pytest.approx(alone.seconds)
    assert alone.low_s < alone.seconds < alone.high_s


@pytest.mark.parametrize(("installed", "stage", "pairs"), [("0.18.5", 3, 1), ("0.19.8", 3, 0)])
def test_hooks_of_some_versions_take_time_for_each_pair_of_parameters(
    installed: str, stage: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hooks_s(parameters: int) -> float:
        trace = replace(step(), parameters=parameters)
        work = work_of(trace, MODEL, 1, CLUSTER, stage)
        return float(work[COLUMNS.index("hooks")] * hardware_of(A100).launch_s)

    monkeypatch.setattr("dsat.projecting.traced_work.version", lambda name: installed)
    more = hooks_s(800) - 8 * hooks_s(100)
    assert more == pytest.approx(pairs * 3.5e-6 * (800**2 - 8 * 100**2), abs=1e-9)


@pytest.mark.parametrize(
    ("ranks", "stride", "bandwidth"),
    [
        (8, 1, A100.link_bandwidth),
        (16, 1, 8 * A100.network_bandwidth),
        (64, 1, 8 * A100.network_bandwidth),
        (12, 1, 4 * A100.network_bandwidth),  # the smallest host has the fewest ports
        (8, 8, A100.network_bandwidth),  # one rank of each host
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(ranks: int, stride: int, bandwidth: float) -> None:
    once = Collectives(STEP, True, ALL_GATHER, ranks, stride, False, 1e12, 1)
    moved = Cluster.of(A100, ranks * stride).network.seconds(once)
    assert moved == pytest.approx((ranks - 1) / ranks * 1e12 / bandwidth, rel=1e-3)
    twice = Cluster.of(A100, ranks * stride).network.seconds(replace(once, kind=ALL_REDUCE))
    assert twice == pytest.approx(2 * moved, rel=1e-3)


@pytest.mark.parametrize(("ranks", "there"), [(8, 0), (16, 8), (64, 56)])
def test_each_gpu_sends_its_parts_of_an_all_to_all_itself(ranks: int, there: int) -> None:
    once = Collectives(FORWARD, True, "alltoall_base_", ranks, 1, False, 1e12, 1)
    moved = Cluster.of(A100, ranks).network.seconds(once)
    here_s = 7 / ranks * 1e12 / A100.link_bandwidth
    assert moved == pytest.approx(
        max(here_s, there / ranks * 1e12 / A100.network_bandwidth), rel=1e-3
    )


def test_collectives_of_activations_grow_with_the_micro_batch() -> None:
    of_layers = Collectives(FORWARD, True, ALL_REDUCE, 2, 1, False, 1e9, 1)
    of_gradients = replace(of_layers, ranks=4, stride=2)
    shared = Parallelism(tensor=2)
    for group, times in ((of_layers, 8), (of_gradients, 1)):
        waited = [
            work_of(step(group), MODEL, micro_batch, CLUSTER, 3, shared)[COLUMNS.index("waited")]
            - work_of(step(), MODEL, micro_batch, CLUSTER, 3, shared)[COLUMNS.index("waited")]
            for micro_batch in (1, 8)
        ]
        assert waited[1] == pytest.approx(times * waited[0], rel=0.01)


def test_copies_of_the_last_micro_step_are_made_once() -> None:
    each = [replace(kernels, last=False) for kernels in MODEL.at(1)]
    copied = Kernels(BACKWARD, True, MEMORY, 4, 0.0, 12 * PARAMS, 1)
    trace = replace(step(), kernels=(*each, *step().kernels, copied))
    work = work_of(trace, MODEL, 4, CLUSTER, 1)
    assert work[COLUMNS.index("copies")] == 0.0
    optimizer = trace.bytes_of(MEMORY, (STEP,))
    assert work[COLUMNS.index("optimizer")] == pytest.approx(optimizer + 12 * PARAMS)


def test_groups_of_all_ranks_grow_and_others_stay() -> None:
    groups = (
        Collectives(STEP, True, ALL_GATHER, 8, 1, False, 1e9, 1),
        Collectives(STEP, True, ALL_REDUCE, 2, 1, False, 1e9, 1),  # tensor parallel
        Collectives(STEP, True, ALL_GATHER, 4, 2, False, 1e9, 1),  # data parallel beside it
    )
    grown = scaled(step(*groups), 64, sharded=True)
    assert [group.ranks for group in grown.collectives] == [64, 2, 32]
    assert grown.bytes_of(MEMORY, (STEP,)) == pytest.approx(30 * PARAMS / 64)


def test_gathers_beside_kernels_are_hidden_and_others_are_not() -> None:
    hidden, waited = step(*gathers()), step(*gathers(overlapped=False))
    assert time_of(hidden, 8).parts["communication"] < 0.1 * time_of(hidden, 8).seconds
    bare = time_of(step(), 8).seconds
    moved = Cluster.of(A100, 8).network.seconds(gathers()[0])
    assert time_of(waited, 8).seconds - bare == pytest.approx(2 * moved * USUAL, rel=0.1)


@pytest.mark.parametrize(
    ("slots", "threads", "bandwidth"),
    [(8, 1, 3e9), (16, 1, 3e9), (8, 0, 13.3e9), (16, 0, 13.3e9), (2, 0, 53e9), (1, 0, 106e9)],
)
def test_an_optimizer_on_the_host_has_its_threads_and_its_share_of_the_memory(
    slots: int, threads: int, bandwidth: float
) -> None:
    """`threads` is 1 if a launcher sets OMP_NUM_THREADS=1, and 0 in trials and under
    `deepspeed`."""
    cluster = Cluster.of(A100, slots, threads=threads)
    assert cluster.host_bandwidth == pytest.approx(bandwidth, rel=0.01)
    trace = replace(step(), kernels=(*MODEL.at(1), Kernels(STEP, True, HOST, 4, 0.0, 66e9, 1)))
    work = work_of(trace, MODEL, 1, cluster, 3)
    speed = ProjectedSpeed(hardware_of(A100), [STAGE_3])
    found = speed.predict(speed.points(work, STAGE_3, 1, 1))
    assert found.parts["optimizer"] == pytest.approx(USUAL * 66e9 / bandwidth, rel=0.01)


def test_trials_correct_the_projection_and_narrow_it() -> None:
    speed = ProjectedSpeed(hardware_of(A100), [STAGE_3])
    points, log_s = [], []
    for micro_batch in (1, 4, 16):
        work = work_of(scaled(step(), 1, sharded=True), MODEL, micro_batch, Cluster.of(A100, 1), 3)
        points.append(speed.points(work, STAGE_3, micro_batch, 1))
        log_s.append(math.log(1.3 * speed.predict(points[-1]).seconds))  # 30 % slower
    fitted = speed.calibrated(
        hardware_of(A100), Points.join(points), np.array(log_s), np.full(3, 0.01)
    )
    work = work_of(step(*gathers()), MODEL, 8, Cluster.of(A100, 8), 3)
    asked = speed.points(work, STAGE_3, 8, 1)
    before, after = speed.predict(asked), fitted.predict(asked)
    assert after.seconds == pytest.approx(1.3 * before.seconds, rel=0.05)
    assert after.high_s / after.low_s < before.high_s / before.low_s
    # The same trials say less of a GPU with the same peak and other links.
    elsewhere = ProjectedSpeed(hardware_of(gpus.find("A800")), [STAGE_3]).calibrated(
        hardware_of(A100), Points.join(points), np.array(log_s), np.full(3, 0.01)
    )
    assert elsewhere.predict(asked).high_s > after.high_s


def test_the_peak_is_that_of_the_elements_that_most_flops_are_in() -> None:
    """With autocast, parameters have four bytes, but matrix products use two."""
    few = Kernels(FORWARD, True, MATMUL, 4, 1e6, 1e3, 3)
    assert replace(MODEL, small=replace(MODEL.small, kernels=(few, *MODEL.at(1)))).itemsize == 2
