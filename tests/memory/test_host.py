"""Host memory of a rank."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

from dsat.memory import closed_form, host
from testing.simulation_host import facts_of

GIB = 2**30
FACTS = replace(facts_of(5 * 10**9), param_bytes=2)


def offloaded(stage: int, **settings: Any) -> dict[str, Any]:
    section = {"device": "cpu", **settings}
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": section},
    }


def needed(config: dict[str, Any]) -> float:
    return sum(host.training(FACTS, config, slots=1))


def test_memory_is_pinned_by_default_as_in_the_installed_deepspeed() -> None:
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    default = DeepSpeedZeroOffloadOptimizerConfig(device="cpu").pin_memory
    assert host.is_pinned(offloaded(2)) == default


@pytest.mark.parametrize(("version", "pinned"), [("0.17.6", False), ("0.19.5", True)])
def test_the_default_of_pinning_depends_on_deepspeed(
    version: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    host.pins_by_default.cache_clear()
    assert host.is_pinned(offloaded(2)) == pinned
    host.pins_by_default.cache_clear()


@pytest.mark.parametrize("stage", [2, 3])
def test_only_pinned_memory_is_rounded_up(stage: int) -> None:
    """18 bytes per parameter: Ren et al., ZeRO-Offload (2021), and the parameters in 16 bits."""
    pinned, pageable = offloaded(stage, pin_memory=True), offloaded(stage, pin_memory=False)
    assert needed(pageable) == pytest.approx(18 * FACTS.num_params, rel=0.01)
    saved = host.saved_without_pinning(FACTS, pinned, slots=1)
    assert saved == pytest.approx(needed(pinned) - needed(pageable), rel=0.01) and saved > GIB
    assert host.saved_without_pinning(FACTS, pageable, slots=1) == 0
    assert host.saved_without_pinning(FACTS, {}, slots=1) == 0


@pytest.mark.parametrize(
    ("name", "value", "size"),
    [
        ("PYTORCH_ALLOC_CONF", "", 8 * GIB),
        ("PYTORCH_ALLOC_CONF", "pinned_max_round_threshold_mb:1024", 5 * GIB),
        ("PYTORCH_CUDA_ALLOC_CONF", "a:b,pinned_max_cached_size_mb:2048", 5 * GIB),
        ("PYTORCH_ALLOC_CONF", "pinned_max_round_threshold_mb:6000", 8 * GIB),
        ("DS_PIN_MEMORY_BACKEND", "native", 5 * GIB),
        ("DS_PIN_MEMORY_BACKEND", "torch", 8 * GIB),
    ],
)
def test_pinned_memory_is_rounded_as_torch_and_deepspeed_are_told(
    name: str, value: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert host.pinned_bytes(5 * GIB) == size
    assert host.pinned_bytes(0) == 0


def test_weights_are_loaded_by_each_rank_unless_stage_3_divides_them() -> None:
    assert host.loaded_bytes(FACTS, offloaded(2)) == 2 * FACTS.num_params
    assert host.loaded_bytes(FACTS, offloaded(3)) == 0
    whole = replace(FACTS, uses_zero_init=False)
    assert host.loaded_bytes(whole, offloaded(3)) == 2 * FACTS.num_params


def test_sub_groups_of_many_sizes_are_rounded_one_by_one() -> None:
    """The simulated engine of 32 B (Qwen2.5) pins 256 GiB: many sub-groups exceed 4 GiB."""
    facts = replace(FACTS, num_params=32_763_876_352, trainable_params=32_763_876_352)
    config = offloaded(3, pin_memory=True)
    pinned, _ = host.training(replace(facts, usual_param=141_557_760), config, slots=1)
    assert pinned / GIB == pytest.approx(256, rel=0.06)


@pytest.mark.parametrize(
    ("optimizer", "parameters", "bytes_each"),
    [("none", "cpu", 2), ("nvme", "cpu", 2), ("cpu", "nvme", 18), ("nvme", "nvme", 0)],
)
def test_what_is_on_the_host_counts_whatever_is_elsewhere(
    optimizer: str, parameters: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")  # does not round up
    config = offloaded(3, device=optimizer)
    config["zero_optimization"]["offload_param"] = {"device": parameters}
    assert needed(config) == pytest.approx(bytes_each * FACTS.num_params, rel=0.01)


@pytest.mark.parametrize(
    ("ratio", "offloaded_part"), [(1.0, 1.0), (0.5, 0.6), (0.25, 0.4), (0.0, 0.0)]
)
def test_partial_offloading_keeps_the_first_sub_groups_on_the_device(
    ratio: float, offloaded_part: float
) -> None:
    """Of 5 sub-groups, `int((1 - ratio) * 5)` stay, with 16 bytes per parameter."""
    section = {"ratio": ratio, "pin_memory": False}
    whole, partial = offloaded(3, pin_memory=False), offloaded(3, **section)
    kept = (1 - offloaded_part) * FACTS.num_params
    assert needed(whole) - needed(partial) == pytest.approx(16 * kept, rel=0.01, abs=GIB)
    of_whole, of_partial = (
        closed_form.estimate(FACTS, config, slots=1, micro_batch=1) for config in (whole, partial)
    )
    assert of_partial.forward - of_whole.forward == pytest.approx(16 * kept, rel=0.01)
    assert of_partial.init - of_whole.init == pytest.approx(8 * kept, rel=0.01)
