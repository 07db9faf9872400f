"""The search space: its settings, values and batch sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsat.command import ds_config
from dsat.space.batch_rule import BatchRule
from dsat.space.deepspeed_settings import PARALLELISM, SETTINGS, Situation, defaults
from dsat.space.overrides import (
    GATHER,
    SEQUENTIAL,
    overrides_for,
    strategy_settings,
)
from dsat.space.space import Freedom, Space
from dsat.values.outcome import ScriptSwitch
from dsat.values.parallelism import SEQUENCE_SIZE, TENSOR_SIZE, Parallelism
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import CPU, NONE, NVME, Strategy, plain, read_strategy

ONE = BatchTriple(1, 1, 1)
BUCKETS = [10**6, 5 * 10**6, 10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9, 5 * 10**9]


# -- micro batches


def test_micro_batches_against_trying_every_number() -> None:
    for total in range(1, 60):
        for divisible_by in range(1, 5):
            for slots in range(1, 4):
                expected = [
                    micro
                    for micro in range(1, total + 1)
                    if total % (micro * slots) == 0 and micro % divisible_by == 0
                ]
                rule = BatchRule(
                    train_batch_size=total,
                    divisible_by=divisible_by,
                    slots_per_trial=slots,
                    own_batch=ONE,
                )
                assert list(rule.allowed_micro_batches) == expected
                listed = replace(rule, micro_batches=(6, 2, 4, 1), max_micro_batch=5)
                assert list(listed.allowed_micro_batches) == [
                    micro for micro in expected if micro in (1, 2, 4)
                ]


@pytest.mark.parametrize(
    ("limits", "micro_batch", "expected"),
    [
        ({}, 5, BatchTriple(5 * 4 * 2, 5, 4)),
        ({"train_batch_size": 48}, 6, BatchTriple(48, 6, 4)),
        ({"train_batch_size": 48}, 24, BatchTriple(48, 24, 1)),
        ({"max_train_batch_size": 100}, 3, BatchTriple(96, 3, 16)),
        ({"max_train_batch_size": 100}, 50, BatchTriple(100, 50, 1)),
        ({"max_train_batch_size": 60}, 50, BatchTriple(100, 50, 1)),  # one's own, say
    ],
)
def test_batch_sizes_that_go_with_a_micro_batch(
    limits: dict[str, Any], micro_batch: int, expected: BatchTriple
) -> None:
    space = Space(strategies=plain(1), micro_batches=range(1, 51), slots=2, gas=4, **limits)
    assert space.batch(micro_batch) == expected


# -- settings


@pytest.mark.parametrize(
    ("num_params", "roomy", "first", "count"),
    [
        (None, None, 5 * 10**8, 8),
        (None, 10**8, 10**8, 8),
        (None, 99 * 10**6, 5 * 10**7, 8),
        (None, 10**5, 10**6, 8),
        # One bucket size that holds the whole model is enough.
        (10**6, None, 10**6, 1),
        (10**6 + 1, None, 5 * 10**6, 2),
        (124 * 10**6, None, 5 * 10**8, 6),
        (7 * 10**10, 10**9, 5 * 10**8, 8),
        (3 * 10**6, 10**8, 5 * 10**6, 2),
        (3 * 10**6, 2 * 10**6, 10**6, 2),
    ],
)
def test_buckets_are_no_larger_than_the_model_and_the_first_does_not_crowd_a_slot(
    num_params: int | None, roomy: int | None, first: int, count: int
) -> None:
    space = Space(
        strategies=plain(1),
        micro_batches=(1,),
        slots=2,
        num_params=num_params,
        roomy_bucket=roomy,
    )
    sizes = dict(space.branches[0].searched)["reduce_bucket_size"]
    assert sizes[0] == first
    assert sorted(sizes) == BUCKETS[:count]


# -- the whole space: conditions, offloading, and what the user wants


def _settings(strategy: Strategy, slots: int = 2, **freedom: Any) -> dict[str, tuple[Any, ...]]:
    config = freedom.pop("config", {"optimizer": {"type": "Adam"}})
    space = Space(
        strategies=[strategy],
        micro_batches=(1,),
        slots=slots,
        freedom=Freedom(base_config=config, **freedom),
    )
    return dict(space.branches[0].searched)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_copied_in_turn_only_to_a_host_and_by_several(stage: int, slots: int) -> None:
    both = stage < 3 and slots > 1
    assert ("round_robin_gradients" in _settings(Strategy(stage, CPU), slots)) is both
    assert "round_robin_gradients" not in _settings(Strategy(stage), slots)


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        ({"type": "Adam"}, True),
        ({"type": "AdamW", "params": {"lr": 1}}, True),
        ({"type": "AdamW", "params": {"torch_adam": True}}, False),
        ({"type": "Lion"}, False),
        (None, False),
    ],
)
def test_only_deepspeeds_own_adam_is_offloaded_in_part(
    optimizer: dict[str, Any] | None, found: bool
) -> None:
    ratio = "offload_optimizer.ratio"
    asked: dict[str, Any] = {
        "config": {} if optimizer is None else {"optimizer": optimizer},
        "tune": (ratio,),
    }
    assert (ratio in _settings(Strategy(3, CPU), **asked)) is found
    assert ratio not in _settings(Strategy(2, CPU), **asked)
    assert ratio not in _settings(Strategy(3, NVME), **asked)
    assert ratio not in _settings(Strategy(3, CPU), config=asked["config"])


INSTALLED = {setting.path: setting.values[0] for setting in SETTINGS}
ON_DEVICE = {"stage3_use_all_reduce_for_fetch_params"}


def test_what_spares_the_host_is_searched_on_several_devices_if_deepspeed_has_it() -> None:
    assert set(_settings(Strategy(3), offload_helps=True, defaults=INSTALLED)) >= ON_DEVICE
    for slots, freedom in (
        (1, {"offload_helps": True, "defaults": INSTALLED}),
        (2, {"offload_helps": False, "defaults": INSTALLED}),
        (2, {"offload_helps": True}),  # nobody asked DeepSpeed
    ):
        assert not ON_DEVICE & set(_settings(Strategy(3), slots, **freedom))
    assert set(_settings(Strategy(3), tune=tuple(ON_DEVICE))) >= ON_DEVICE


def test_the_installed_deepspeed_tells_settings_and_defaults() -> None:
    assert "round_robin_gradients" in _settings(Strategy(2, CPU), defaults=INSTALLED)
    without = {path: value for path, value in INSTALLED.items() if "round_robin" not in path}
    assert "round_robin_gradients" not in _settings(Strategy(2, CPU), defaults=without)
    key = "offload_optimizer.pin_memory"
    older = {**INSTALLED, f"zero_optimization.{key}": False}
    assert _settings(Strategy(2, CPU), defaults=INSTALLED)[key] == (True, False)
    assert _settings(Strategy(2, CPU), defaults=older)[key] == (False, True)
    own = {"zero_optimization": {"offload_optimizer": {"pin_memory": False}}}
    found = _settings(Strategy(2, CPU), defaults=INSTALLED, config=own, tune=[key])
    assert found[key] == (False, True)


NEVER_UNASKED = [
    setting.key for setting in SETTINGS if not setting.unasked(Situation(Strategy(3), 8))
]


def test_what_changes_numbers_is_searched_only_when_asked_for() -> None:
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "Adam"}}
    freedom = {"config": config, "offload_helps": True, "defaults": INSTALLED}
    without_effect = "allgather_bucket_size"
    assert without_effect not in _settings(Strategy(2), 8, **freedom)
    assert without_effect in _settings(Strategy(2), 8, tune=(without_effect,), **freedom)
    never = set(NEVER_UNASKED) - ON_DEVICE - {"zero_hpz_partition_size", *PARALLELISM}
    never -= {without_effect}
    assert {"bf16", "offload_optimizer.super_offload", "zero_quantized_weights"} < never
    for strategy in (Strategy(3), Strategy(3, CPU)):
        assert not never & set(_settings(strategy, 8, **freedom))
    assert set(_settings(Strategy(3, CPU), 8, tune=tuple(never), **freedom)) >= never - {"compile"}
    states = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": False}
    own = {**config, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    assert _settings(Strategy(2), tune=["bf16"], config=own)["bf16"][0] == states
    for strategy, wrong in ((Strategy(2), {}), (Strategy(2, NVME), config)):
        assert "bf16" not in _settings(strategy, tune=["bf16"], config=wrong)


def _sizes(
    *tune: str, config: dict[str, Any] | None = None, per_host: int = 0
) -> list[Parallelism]:
    """Return the parallelism that a search tries on 8 slots with 12 heads."""
    freedom = Freedom(tune=tune, base_config=config or {}, slots_per_host=per_host)
    space = Space(
        strategies=plain(0),
        micro_batches=[1],
        slots=8,
        freedom=freedom,
        heads=12,
    )
    [branch] = space.branches
    return [freedom.parallelism(branch.settings(n)) for n in range(branch.count)]


def test_slots_are_divided_by_divisors_of_heads_slots_and_a_hosts_slots() -> None:
    own = {"tensor_parallel": {"autotp_size": 2}}
    assert _sizes() == [Parallelism()]
    assert _sizes(config=own) == [Parallelism(2)]
    assert _sizes(TENSOR_SIZE) == [Parallelism(n) for n in (1, 2, 4)]
    assert _sizes(TENSOR_SIZE, config=own) == [Parallelism(n) for n in (2, 1, 4)]
    assert _sizes(SEQUENCE_SIZE, per_host=2) == [Parallelism(1, n) for n in (1, 2)]
    both = _sizes(TENSOR_SIZE, SEQUENCE_SIZE)
    assert both[0] == Parallelism()
    assert sorted(map(str, both[1:])) == sorted(
        str(each) for n in (2, 4) for each in (Parallelism(n), Parallelism(1, n))
    )


def test_deepcompile_is_searched_on_devices_that_offload_nothing() -> None:
    asked: dict[str, Any] = {"tune": ["compile"], "defaults": INSTALLED, "offload_helps": True}
    plain = {"deepcompile": False, "offload_activation": False, "offload_opt_states": False}
    compiled = {**plain, "deepcompile": True}
    assert _settings(Strategy(1), **asked)["compile"] == (plain, compiled)
    with_offloading = [
        {**compiled, f"offload_{what}": True} for what in ("activation", "opt_states")
    ]
    assert _settings(Strategy(3), **asked)["compile"] == (plain, compiled, *with_offloading)
    own: dict[str, Any] = {**asked, "config": {"compile": {"deepcompile": True}}}
    assert _settings(Strategy(2), **own)["compile"] == (compiled, plain)
    for strategy, other in (
        (Strategy(0), asked),
        (Strategy(3, CPU), asked),
        (Strategy(3), {**asked, "offload_helps": False}),
        (Strategy(3), {**asked, "tune": []}),
    ):
        assert "compile" not in _settings(strategy, **other)


def test_parameters_are_kept_within_each_host_by_a_trial_over_several() -> None:
    key = "zero_hpz_partition_size"
    assert _settings(Strategy(3), 8, slots_per_host=4, defaults=INSTALLED)[key] == (1, 4)
    assert key not in _settings(Strategy(3), 10, slots_per_host=4, defaults=INSTALLED)
    assert key not in _settings(Strategy(3), 8, defaults=INSTALLED)
    assert _settings(Strategy(3), 8, tune=[key])[key] == (1, 2, 4)
    assert key not in _settings(Strategy(3), 2, tune=[key])


def test_every_value_of_every_setting_reaches_deepspeeds_own_configuration() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    places = {
        "zero_optimization": "zero_config",
        "bf16": "bfloat16_config",
        "activation_checkpointing": "activation_checkpointing_config",
        "compile": "compile_config",
        "tensor_parallel": "tensor_parallel_config",
    }
    base = {"bf16": {"enabled": True}}
    # Exceptions: only the engine reads one setting, and another setting changes a third one.
    declared = [setting for setting in SETTINGS if setting.key not in (SEQUENCE_SIZE, SEQUENTIAL)]
    for stage in range(4):
        own = [setting for setting in declared if stage in setting.stages]
        strategy = Strategy(stage, CPU if stage else NONE, CPU if stage == 3 else NONE)
        for number in range(max(len(setting.values) for setting in own)):
            chosen = [(setting, setting.values[number % len(setting.values)]) for setting in own]
            settings = {"stage": stage, **strategy_settings(strategy, base)}
            settings |= {setting.key: value for setting, value in chosen}
            read = DeepSpeedConfig(
                ds_config.prepare_for_training(base, overrides_for(settings, ONE))
            )
            for setting, value in chosen:
                section, *keys = setting.path.split(".")
                found = getattr(read, places[section])
                for key in keys:
                    found = getattr(found, key.removeprefix("stage3_"))
                if isinstance(value, dict):
                    found = {key: getattr(found, key) for key in value}
                assert found == value, (setting.key, stage)


@pytest.mark.parametrize(
    ("zero", "strategy", "expected"),
    [
        ({}, Strategy(2), {}),
        ({}, Strategy(2, CPU), {"offload_optimizer.device": "cpu"}),
        (
            {},
            Strategy(3, NVME, NVME),
            {
                "offload_optimizer.device": "nvme",
                "offload_optimizer.nvme_path": "/nvme",
                "offload_param.device": "nvme",
                "offload_param.nvme_path": "/nvme",
                GATHER: True,
            },
        ),
        ({"stage": 2, GATHER: "auto"}, Strategy(3), {GATHER: True}),
        ({"stage": 2, GATHER: False}, Strategy(3), {GATHER: True}),
        ({"stage": 2, GATHER: True}, Strategy(3), {}),
        ({"stage": 3, GATHER: False}, Strategy(3), {}),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            Strategy(3),
            {"offload_optimizer.device": "none"},
        ),
        ({"offload_optimizer": {"device": "cpu"}}, Strategy(2, CPU), {}),
        (
            {"offload_optimizer": {"device": "nvme"}},
            Strategy(2, CPU),
            {"offload_optimizer.device": "cpu"},
        ),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            Strategy(0),
            {"offload_optimizer.device": "none", "offload_param.device": "none"},
        ),
        (
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            Strategy(2, CPU),
            {"offload_optimizer.ratio": 1.0},
        ),
    ],
)
def test_settings_that_turn_the_users_configuration_into_a_strategy(
    zero: dict[str, Any], strategy: Strategy, expected: dict[str, Any]
) -> None:
    config = {"optimizer": {"type": "Adam"}, "zero_optimization": zero}
    found = strategy_settings(strategy, config, "/nvme")
    assert found == expected
    merged = ds_config.merge(config, overrides_for({"stage": strategy.stage, **found}, ONE))
    assert read_strategy(merged) == strategy


def test_defaults_are_deepspeeds_own() -> None:
    """They equal the defaults of DeepSpeedZeroConfig's fields in each stage."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for stage in (1, 2, 3):
        own = DeepSpeedZeroConfig(stage=stage)
        for key, value in (defaults(stage) | defaults(stage, later=True)).items():
            assert getattr(own, key.removeprefix("stage3_")) == value, (stage, key)


# -- switches of the script

FOUND = {
    "gradient_checkpointing": ScriptSwitch((False, True), in_arguments=True),
    "attn_implementation": ScriptSwitch(("sdpa", "eager")),
    "use_liger_kernel": ScriptSwitch((False, True), in_arguments=True),
    "packing": ScriptSwitch((False, True), in_arguments=True),
}


def _with_switches(strategy: Strategy, **freedom: Any) -> Space:
    return Space(
        strategies=[strategy],
        micro_batches=range(1, 9),
        slots=1,
        freedom=Freedom(**{"fix": tuple({k.key for k in SETTINGS}), **freedom}),
        found_switches=FOUND,
    )


def test_a_trial_sets_the_switches_that_differ_from_the_scripts_own() -> None:
    listed = {"attn_implementation": (None, "flash_attention_3"), "--workers": (None, "4")}
    space = _with_switches(Strategy(0), listed_switches=listed)
    [branch] = space.branches
    assert dict(branch.searched)["attn_implementation"] == ("sdpa", "flash_attention_3")
    assert space.script_args(branch.settings(0)) == {}
    assert space.script_args(branch.settings(branch.count - 1)) == {
        "gradient_checkpointing": True,
        "attn_implementation": "flash_attention_3",
        "--workers": "4",
    }
    assert "--workers" not in overrides_for(branch.settings(0), ONE)


def test_settings_that_contradict_each_other_are_the_same_configuration() -> None:
    bucket, sequential = "stage3_prefetch_bucket_size", "stage3_allgather_sequential"
    configs = [overrides_for({"stage": 3, bucket: n, sequential: True}, ONE) for n in (1, 5)]
    assert configs[0] == configs[1]
