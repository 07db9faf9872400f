"""The collectives of a step: compared with traced steps of DeepSpeed, and their costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest

from dsat.search.collectives import Network, list_collectives
from dsat.search.gpus import GpuModel
from dsat.simulation.client import Simulator
from dsat.simulation.protocol import Question
from dsat.space.deepspeed_settings import defaults
from dsat.values.step_trace import ALL_GATHER, ALL_REDUCE, BACKWARD, STEP, Collectives
from testing.allocator import configuration
from testing.local import PATIENCE_S, engine_of

GB_S = 1e9
NCCL = Network(200 * GB_S, 20 * GB_S, 8, GpuModel.protocols)
PARAMS, ITEMSIZE, RANKS = 7_000_000_000, 2, 16
NOTHING_STAYS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def listed(stage: int, *, params: int = PARAMS, **zero: Any) -> list[Collectives]:
    settings = {**defaults(stage), **zero}
    return list_collectives(
        stage, settings, ranks=RANKS, params=params, trainable=params, itemsize=ITEMSIZE
    )


def moved(found: list[Collectives], gas: int) -> float:
    """Return the bytes that each rank moves in a step, as multiples of the parameters' bytes."""
    total = 0.0
    for group in found:
        times = 1 if group.last else gas - 1
        total += times * (2 if group.kind == ALL_REDUCE else 1) * group.bytes
    return total / (PARAMS * ITEMSIZE)


@pytest.mark.parametrize(
    ("stage", "gas", "zero", "expected"),
    [
        (0, 8, {}, 2),
        (1, 8, {}, 2 + 1),
        (2, 8, {}, 8 * 2 + 1),
        (2, 8, {"use_multi_rank_bucket_allreduce": False}, 8 + 1),
        (2, 8, {"use_multi_rank_bucket_allreduce": False, "reduce_scatter": False}, 17),
        (3, 8, NOTHING_STAYS, 8 * 3),
        (3, 8, {**NOTHING_STAYS, "reduce_scatter": False}, 8 * 4),
    ],
)
def test_each_stage_moves_what_deepspeed_calls(
    stage: int, gas: int, zero: dict[str, Any], expected: int
) -> None:
    assert moved(listed(stage, **zero), gas) == pytest.approx(expected)


def test_a_small_model_stays_gathered_between_the_passes() -> None:
    gathers = [c for c in listed(3, params=10**8) if c.kind == ALL_GATHER and c.phase == BACKWARD]
    assert sum(group.bytes for group in gathers) == 0


def test_one_rank_has_nothing_to_say() -> None:
    assert list_collectives(3, defaults(3), ranks=1, params=1e9, trainable=1e9, itemsize=2) == []


@pytest.mark.parametrize("ranks", [2, 8, 16, 64, 512])
@pytest.mark.parametrize("size", [10**3, 10**6, 10**9])
def test_a_ring_or_a_tree_by_latency_and_bandwidth(ranks: int, size: int) -> None:
    """The alpha-beta model by hand: rounds x (n - 1) / n of the bytes, and a hop per further
    rank."""
    group = Collectives(BACKWARD, True, ALL_REDUCE, ranks, 1, False, size, 1)
    hosts = math.ceil(ranks / 8)
    bandwidth = min(200 * GB_S, (math.inf if hosts == 1 else 8) * 20 * GB_S)
    expected = []
    for part, hop_s, host_hop_s in GpuModel.protocols:
        ring = (ranks - hosts) * hop_s + (hosts - 1) * host_hop_s
        tree = (min(ranks, 8) - 1) * hop_s + math.ceil(math.log2(hosts)) * host_hop_s
        latency = 2 * (min(ring, tree) if hosts > 1 else ring)
        expected.append(2 * (ranks - 1) / ranks * size / bandwidth / part + latency)
    assert NCCL.seconds(group) == pytest.approx(min(expected))


def test_latency_grows_with_the_number_of_ranks() -> None:
    small = [
        NCCL.seconds(Collectives(BACKWARD, True, ALL_GATHER, n, 1, False, 1.0, 100))
        for n in (2, 8, 64)
    ]
    assert small == sorted(small) and small[-1] > 4 * small[0]


# -- against DeepSpeed's own calls


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    entry = "python3 train.py --model gpt --deepspeed_config ds_config.json"
    engine = engine_of("memory", tmp_path_factory.mktemp("gpt"), entry=entry, imported=True)
    try:
        with Simulator(engine, as_cpu=False, timeout_s=PATIENCE_S) as simulator:
            yield simulator
    finally:
        engine.close()


CASES = [
    (0, {}),
    *(
        (stage, {"overlap_comm": overlaps, **other})
        for stage, overlaps, other in itertools.product(
            (1, 2),
            (False, True),
            ({}, {"reduce_scatter": False}, {"use_multi_rank_bucket_allreduce": False}),
        )
    ),
    *(
        (3, {"overlap_comm": overlaps, **NOTHING_STAYS, **other})
        for overlaps, other in itertools.product((False, True), ({}, {"reduce_scatter": False}))
    ),
    (3, {"overlap_comm": True, "stage3_param_persistence_threshold": 0}),
]


@pytest.mark.nightly
def test_the_list_is_what_traced_steps_call(simulator: Simulator) -> None:
    slots = 8
    questions = []
    for stage, zero in CASES:
        config = configuration(stage, gas=2)
        config["zero_optimization"] |= zero
        questions.append(Question(config, 2, slots))
    facts, _ = simulator.traced_facts(configuration(2))
    whole = facts.param_bytes * facts.num_params
    for (stage, zero), answer in zip(
        CASES,
        map(itemgetter(1), sorted(simulator.trace_each(questions), key=itemgetter(0))),
        strict=True,
    ):
        assert not isinstance(answer, str), answer
        expected = list_collectives(
            stage,
            {
                **defaults(stage),
                **questions[CASES.index((stage, zero))].config["zero_optimization"],
            },
            ranks=slots,
            params=facts.num_params,
            trainable=facts.trainable_params,
            itemsize=facts.param_bytes,
        )
        assert totals(answer[1].collectives, whole) == pytest.approx(
            totals(expected, whole),
            abs=0.26,  # shared parameters are gathered twice
        ), (stage, zero)


def totals(found: Any, whole: float) -> dict[tuple[Any, ...], float]:
    """Return the moved bytes as parts of the parameters', by when and how they move."""
    parts: dict[tuple[Any, ...], float] = {}
    for group in found:
        if group.phase == STEP and group.bytes < 0.01 * whole:  # norms
            continue
        key = (group.last, group.phase, group.kind, group.overlapped)
        parts[key] = parts.get(key, 0.0) + group.bytes / whole
    return {key: part for key, part in parts.items() if part}
