"""Memory of every configuration, predicted from a few simulations and corrected by trials."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsat.memory import closed_form, host
from dsat.memory.estimate import CLOSED_FORM, PHASES, SIMULATED
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Anchor, Basis, MemoryModel, Variant
from dsat.values.outcome import MemoryUse, Outcome, OutcomeKind
from dsat.values.parallelism import Parallelism
from testing.helpers import ran, weightless

MIB, GIB = 2**20, 2**30
FACTS = ModelFacts(
    num_params=100 * MIB,
    trainable_params=100 * MIB,
    largest_param=10 * MIB,
    forward_bytes_per_sample=90 * MIB,
    backward_bytes_per_sample=100 * MIB,
    first_gradient_bytes_per_sample=80 * MIB,
)


def config(stage: int, **zero: Any) -> dict[str, Any]:
    section = {"stage": stage, "reduce_bucket_size": 10**6, **zero}
    return {"bf16": {"enabled": True}, "zero_optimization": section}


def simulated(stage: int, micro_batch: int, more: int, slots: int = 1) -> Anchor:
    """Make a simulation that finds `more` bytes than the closed form, in every phase."""
    plain = closed_form.estimate(FACTS, config(stage), slots=slots, micro_batch=micro_batch)
    peaks = {phase: getattr(plain, phase) + more for phase in PHASES}
    estimate = replace(plain, **peaks, source=SIMULATED)
    return Anchor(config(stage), micro_batch, estimate, slots)


def model(*anchors: Anchor, limit: int = 8 * GIB, **more: Any) -> MemoryModel:
    basis = Basis((Variant({}, FACTS, anchors),))
    return MemoryModel(basis, slots=1, limit_bytes=limit, **more)


def used(bytes_by_phase: dict[str, int], context: int = 0) -> Outcome:
    return replace(ran(), memory=MemoryUse(bytes_by_phase, context_bytes=context))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_simulations_the_closed_form_answers(stage: int) -> None:
    memory = model()
    for micro_batch in (1, 7, 100):
        plain = closed_form.estimate(FACTS, config(stage), slots=1, micro_batch=micro_batch)
        shape = memory.shape(config(stage), {})
        assert shape.source == CLOSED_FORM
        assert memory.predicted_bytes(shape, micro_batch) == pytest.approx(plain.peak, abs=1)


def test_what_is_auto_has_its_default_and_the_profiles_type() -> None:
    auto = config(2, reduce_bucket_size="auto", stage3_max_live_parameters="auto")
    auto["bf16"] = {"enabled": "auto"}
    for size, enabled in ((2, True), (4, False)):
        facts = replace(FACTS, param_bytes=size)
        said = {**config(2), "bf16": {"enabled": enabled}}
        del said["zero_optimization"]["reduce_bucket_size"]
        plain = closed_form.estimate(facts, said, slots=1, micro_batch=3)
        assert closed_form.estimate(facts, auto, slots=1, micro_batch=3) == plain


def test_an_auto_bucket_has_the_size_that_a_trainer_gives_it() -> None:
    """This size is the square of the hidden size, also in the first trial; DeepSpeed's default
    is 5e8."""
    facts = replace(FACTS, hidden_size=1024)
    auto, square = config(2, reduce_bucket_size="auto"), config(2, reduce_bucket_size=1024**2)
    sizes = [closed_form.estimate(facts, each, slots=2, micro_batch=3) for each in (auto, square)]
    assert sizes[0] == sizes[1]


def test_a_bucket_on_processor_cores_counts_as_far_as_it_is_written() -> None:
    """Only with a limit on allocations does a bucket count whole, as its unwritten part does
    too."""
    usual = config(2, reduce_bucket_size="auto")
    for more, counted in (
        ({"counts_context": True}, FACTS.trainable_params),
        ({"counts_context": True, "on_device": True}, 5 * 10**8),
        ({}, 5 * 10**8),
    ):
        memory, sized = model(**more), config(2, reduce_bucket_size=counted)
        plain = closed_form.estimate(FACTS, sized, slots=1, micro_batch=1)
        predicted = memory.predicted_bytes(memory.shape(usual, {}), 1)
        assert predicted == pytest.approx(plain.peak, abs=1)


def test_a_simulation_moves_its_strategy_at_other_numbers_of_slots_too() -> None:
    anchors = simulated(3, 20, 300 * MIB, slots=64), simulated(3, 20, 200 * MIB, slots=4)
    basis = Basis.of_model(FACTS, anchors)
    for slots, more in ((1, 200), (4, 200), (5, 221.33), (32, 293.33), (64, 300), (512, 300)):
        memory = MemoryModel(basis, slots=slots, limit_bytes=8 * GIB)
        plain = closed_form.estimate(FACTS, config(3), slots=slots, micro_batch=9)
        predicted = memory.predicted_bytes(memory.shape(config(3), {}), 9)
        assert predicted == pytest.approx(plain.peak + more * MIB, abs=MIB / 50)


@pytest.mark.parametrize("simulated_at", [(8,), (1, 8)])
def test_an_optimizer_with_less_state_saves_less_among_more_slots(
    simulated_at: tuple[int, ...],
) -> None:
    """The closed form counts 12 bytes per parameter, but this optimizer has only 4."""

    def needed(slots: int) -> float:
        plain = closed_form.estimate(FACTS, config(3), slots=slots, micro_batch=0)
        return plain.peak - 8 * FACTS.num_params / slots

    anchors = [simulated(3, 0, -8 * FACTS.num_params // slots, slots) for slots in simulated_at]
    basis = Basis.of_model(FACTS, anchors)
    for slots in (2, 8, 16, 512):
        memory = MemoryModel(basis, slots=slots, limit_bytes=8 * GIB)
        predicted = memory.predicted_bytes(memory.shape(config(3), {}), 0)
        assert predicted >= needed(slots) - 2
        if slots >= min(simulated_at):
            assert predicted == pytest.approx(needed(slots), abs=2)


def test_a_simulation_moves_its_strategy_and_no_other() -> None:
    memory = model(simulated(2, 20, 300 * MIB))
    for stage, more in ((1, 0), (2, 300 * MIB)):
        plain = closed_form.estimate(FACTS, config(stage), slots=1, micro_batch=9)
        shape = memory.shape(config(stage), {})
        assert memory.predicted_bytes(shape, 9) == pytest.approx(plain.peak + more, abs=2)
    # Other settings of the strategy differ from the simulated ones as the closed form says.
    other = config(2, reduce_bucket_size=2 * 10**8)
    plain = closed_form.estimate(FACTS, other, slots=1, micro_batch=30)
    predicted = memory.predicted_bytes(memory.shape(other, {}), 30)
    assert predicted == pytest.approx(plain.peak + 300 * MIB, abs=2)


@pytest.mark.parametrize("limit", [3, 4, 8, 30])
@pytest.mark.parametrize("bucket", [10**6, 10**8, 5 * 10**8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_largest_micro_batch_fits_and_the_next_does_not(
    stage: int, bucket: int, limit: int
) -> None:
    memory = model(simulated(2, 20, 300 * MIB), limit=limit * GIB)
    shape = memory.shape(config(stage, reduce_bucket_size=bucket), {})
    largest = int(memory.largest(shape))
    assert memory.fits(shape, largest) if largest else not memory.fits(shape, 1)
    assert not memory.fits(shape, largest + 1)


def test_parameters_are_flattened_on_the_host_where_the_device_has_no_room() -> None:
    """DeepSpeed copies 200 MiB of parameters; the backward pass needs less than both copies."""
    offload = config(2, offload_optimizer={"device": "cpu"})
    basis = Basis((Variant({}, replace(FACTS, largest_param=MIB)),))
    for limit, on_device, largest in ((390, True, 1), (390, False, 0), (430, True, 2)):
        memory = MemoryModel(basis, slots=16, limit_bytes=limit * MIB, on_device=on_device)
        shape = memory.shape(offload, {})
        assert int(memory.largest(shape)) == largest, (limit, on_device)
        predicted = memory.predicted_bytes(shape, 1)
        assert (predicted >= 400 * MIB) == (limit > 400 or not on_device)


def test_the_margin_shrinks_with_the_first_trial() -> None:
    memory = model(simulated(1, 10, 0))
    shape = memory.shape(config(1), {})
    bound = memory.largest(shape)
    memory.learn(shape, 1, used({p: round(shape.peak(p, 1)) for p in PHASES}))
    assert memory.largest(shape) > bound
    needed = memory.predicted_bytes(shape, int(memory.largest(shape)))
    assert needed * 1.02 <= memory.limit_bytes < needed * 1.035


def test_the_context_counts_where_the_limit_is_the_devices() -> None:
    exact = {}
    for counts in (False, True):
        memory = model(simulated(1, 10, 0), counts_context=counts)
        shape = memory.shape(config(1), {})
        peaks = {p: round(shape.peak(p, 1)) for p in PHASES}
        memory.learn(shape, 1, used(peaks, context=GIB))
        exact[counts] = memory.predicted_bytes(shape, 4)
    assert exact[True] == exact[False] + GIB


def test_out_of_memory_against_the_prediction_makes_it_careful_step_by_step() -> None:
    memory = model(simulated(1, 10, 0), simulated(2, 10, 0))
    one, two = (memory.shape(config(stage), {}) for stage in (1, 2))
    largest, of_two = int(memory.largest(one)), memory.largest(two)
    failed = Outcome(OutcomeKind.OOM)
    memory.learn(one, largest, failed)
    assert not memory.fits(one, largest)
    assert 0.85 * largest < memory.largest(one) < largest
    assert 0.93 * of_two < memory.largest(two) <= of_two, "another strategy"
    for _ in range(3):
        memory.learn(one, 2, failed)
    assert 0 < memory.largest(one) < 0.75 * largest
    assert memory.largest(two) < 0.97 * of_two, "more room everywhere"
    # A failure of a trial that was not expected to fit is no news.
    bound = memory.largest(one)
    memory.learn(one, 10 * largest, failed)
    assert memory.largest(one) == bound


def test_switches_that_were_not_simulated_are_guessed_and_hold_nothing_back() -> None:
    basis = Basis((Variant({"gradient_checkpointing": False}, FACTS, (simulated(1, 10, 0),)),))
    memory = MemoryModel(basis, slots=1, limit_bytes=8 * GIB)
    own = memory.shape(config(1), {})
    recomputing = memory.shape(config(1), {"gradient_checkpointing": True})
    assert 2 < memory.largest(recomputing) / memory.largest(own) < 4
    assert memory.fits(recomputing, 10**6) and not memory.fits(own, 10**6)
    before = memory.predicted_bytes(own, 5), memory.predicted_bytes(recomputing, 5)
    memory.learn(recomputing, 5, used(dict.fromkeys(PHASES, 7 * GIB)))
    assert (memory.predicted_bytes(own, 5), memory.predicted_bytes(recomputing, 5)) == before


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_needs_16_bytes_of_the_host_for_each_parameter(
    stage: int, slots: int
) -> None:
    """Weights, gradients and two moments in fp32: Ren et al., ZeRO-Offload (2021)."""
    offloaded = config(stage, offload_optimizer={"device": "cpu", "pin_memory": True})
    pinned, pageable = host.training(FACTS, offloaded, slots=slots)
    share = FACTS.num_params / slots
    assert pageable == (12 if stage == 3 else 8) * share, "moments, and weights if those are cut"
    assert 16 * share <= pinned + pageable, "pinned blocks are powers of two"


def test_without_zero_init_the_whole_model_is_there_before_stage_3_divides_it() -> None:
    for uses_it in (True, False):
        facts = replace(FACTS, uses_zero_init=uses_it)
        found = closed_form.estimate(facts, config(3), slots=64, micro_batch=1).init
        assert (found >= 2 * FACTS.num_params) is not uses_it


def test_gradients_of_the_largest_activation_are_there_beside_what_is_kept() -> None:
    """These are usually the logits: they are kept for the backward pass, and their gradient
    twice."""
    profile = replace(weightless(10), activation_bytes_per_sample=50 * MIB)
    small = ModelFacts.of_profile(profile)
    large = ModelFacts.of_profile(replace(profile, largest_activation_bytes_per_sample=20 * MIB))
    added = large.backward_bytes_per_sample - small.backward_bytes_per_sample
    assert added == 2 * 20 * MIB


def test_tensor_parallelism_divides_24_of_34_bytes_of_activations() -> None:
    """Korthikanti et al., Reducing Activation Recomputation (2022), equation 2."""
    divided = FACTS.divided(Parallelism(tensor=4, sequence=2))
    assert divided.num_params == FACTS.num_params // 4
    kept = divided.forward_bytes_per_sample / FACTS.forward_bytes_per_sample
    assert kept == pytest.approx(16 / 34 / 2)


def test_what_the_allocator_loses_between_blocks_is_learned_where_memory_is_full() -> None:
    memory = model(limit=16 * GIB)
    shape = memory.shape(config(1), {})

    def reserves(size: int, factor: float) -> float:
        """Learn from a trial that allocates as predicted but reserves `factor` times as much.

        Return the limit, divided by the prediction for the micro batch that is then the largest.
        """
        peaks = {phase: round(shape.peak(phase, size)) for phase in PHASES}
        reserved = {"backward": round(factor * max(peaks.values()))}
        memory.learn(shape, size, replace(ran(), memory=MemoryUse(peaks, reserved)))
        return 16 * GIB / memory.predicted_bytes(shape, memory.largest(shape))

    assert reserves(10, 2.0) == pytest.approx(1.02), "much is free, and it keeps that"
    assert reserves(80, 1.1) == pytest.approx(1.02 * 1.1, rel=1e-3)
    assert reserves(60, 1.2) == pytest.approx(1.02 * 1.1, rel=1e-3), "less was reserved in all"
    assert reserves(120, 1.03) == pytest.approx(1.02 * 1.03, rel=1e-3)
    assert reserves(110, 1.3) == pytest.approx(1.02 * 1.25, rel=1e-3), "it gives back what it can"


def test_what_a_host_does_not_hold_is_not_tried() -> None:
    offloaded = config(2, offload_optimizer={"device": "cpu"})
    needed = sum(host.training(FACTS, offloaded, slots=1))
    assert needed > 16 * FACTS.num_params
    for limit, fits in ((0, True), (round(1.1 * needed), True), (round(0.9 * needed), False)):
        memory = model(host_limit_bytes=limit)
        shape = memory.shape(offloaded, {})
        assert memory.fits(shape, 1) is fits
        assert (memory.largest(shape) > 0) is fits
        assert memory.fits(memory.shape(config(2), {}), 1), "what is on the device needs no host"
    for stage, is_on_disk in ((2, False), (3, True)):
        on_disk = config(stage, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"})
        assert memory.fits(memory.shape(on_disk, {}), 1) is is_on_disk
    # A simulation that measures more corrects the formula.
    anchor = simulated(2, 1, 0)
    seen = replace(anchor.estimate, host_pageable=round(2 * needed), host_pinned=0)
    memory = model(Anchor(offloaded, 1, seen), host_limit_bytes=round(1.5 * needed))
    assert not memory.fits(memory.shape(offloaded, {}), 1)


@pytest.mark.parametrize("limit", [2, 8, 30])
def test_a_loss_over_all_pairs_of_samples_bounds_the_micro_batch(limit: int) -> None:
    """Each pair needs 20 KiB, which a second simulation distinguishes from a constant."""
    pair, facts = (
        20 * 2**10,
        replace(FACTS, num_params=MIB, trainable_params=MIB, largest_param=MIB),
    )
    facts = facts.scaled(0.01)

    def peak(micro_batch: int) -> int:
        plain = closed_form.estimate(facts, config(1), slots=1, micro_batch=micro_batch)
        return plain.backward + pair * micro_batch**2

    def simulated_at(micro_batch: int) -> Anchor:
        plain = closed_form.estimate(facts, config(1), slots=1, micro_batch=micro_batch)
        return Anchor(config(1), micro_batch, replace(plain, backward=peak(micro_batch)))

    basis = Basis.of_model(facts, [simulated_at(4000), simulated_at(900)])
    memory = MemoryModel(basis, slots=1, limit_bytes=limit * GIB)
    shape = memory.shape(config(1), {})
    for micro_batch in (100, 1000, 10_000):
        expected = pytest.approx(peak(micro_batch), rel=1e-6)
        assert memory.predicted_bytes(shape, micro_batch) == expected
    largest = int(memory.largest(shape))
    assert memory.fits(shape, largest) and not memory.fits(shape, largest + 1)


@pytest.mark.parametrize(
    "message",
    [
        "out of memory: tried to allocate 576.00 GiB",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 576.00 GiB. GPU 0 has a total",
    ],
)
def test_the_block_that_was_asked_for_bounds_all_strategies(message: str) -> None:
    small = replace(FACTS, num_params=MIB, trainable_params=MIB, largest_param=MIB).scaled(1e-5)
    memory = MemoryModel(Basis.of_model(small), slots=1, limit_bytes=8 * GIB)
    shapes = [memory.shape(config(stage), {}) for stage in (0, 1, 2, 3)]
    assert all(memory.fits(shape, 400_000) for shape in shapes)
    failed = Outcome(OutcomeKind.OOM, message=message)
    fresh = MemoryModel(Basis.of_model(small), slots=1, limit_bytes=8 * GIB)
    fresh.learn(shapes[1], 400_000, failed)
    assert fresh.largest(shapes[0]) > 300_000, "nothing smaller has run: it may be a copy"
    peaks = {phase: round(shapes[1].peak(phase, 8)) for phase in ("forward", "backward", "step")}
    memory.learn(shapes[1], 8, Outcome(OutcomeKind.OK, memory=MemoryUse(allocated_bytes=peaks)))
    memory.learn(shapes[1], 400_000, failed)
    for shape in shapes:
        # Two blocks of 4 bytes per pair fit up to 32,768.
        assert 25_000 < memory.largest(shape) < 33_500


def test_state_on_nvme_is_simulated_on_the_host_and_not_counted_there() -> None:
    mixed = config(3, offload_optimizer={"device": "nvme"}, offload_param={"device": "cpu"})
    needed = sum(host.training(FACTS, mixed, slots=1))
    estimate = closed_form.estimate(FACTS, mixed, slots=1, micro_batch=1)
    memory = model(Anchor(mixed, 1, replace(estimate, host_pageable=4 * GIB)))
    assert memory.shape(mixed, {}).host_bytes == needed > 0
