from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dsat.command.ds_config import (
    BATCH_KEYS,
    check_sections,
    fingerprint,
    merge,
    parse,
    read,
)
from dsat.command.ds_types import normalize
from dsat.memory import closed_form
from testing.scenarios import User
from testing.simulation_host import facts_of
from testing.world import World
from tests.command.plans import Reader

NESTED: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99]}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10,
}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(NESTED, indent=2),
        '{"a": 1, # one\n "b": [1, 2,], /* two */ "c": {d: auto\n}}',
        "a: 1\nb: no comma\n",
        '\ufeff{"a": true}',
        '{"a": {"b": 1, "c": 2, "b": 3}}',
        '{"a": {"b": 1, # one\n "b": 3}}',
        '{"a": 1 "b": 2}',
        '{"a": 1',
        "",
    ],
)
def test_a_configuration_is_read_as_deepspeed_reads_it(text: str) -> None:
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:  # as in DeepSpeedConfig.__init__
        expected = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except ValueError:
        with pytest.raises(ValueError, match=r"is not valid JSON: .* \(line|duplicate keys"):
            parse(text)
    else:
        assert parse(text) == expected


@pytest.mark.parametrize(
    ("own", "current"),
    [
        ({"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}),
        ({"cpu_offload": False, "cpu_offload_param": True}, {"offload_param": {"device": "cpu"}}),
        ({"prefetch_bucket_size": 7}, {"stage3_prefetch_bucket_size": 7}),
        (
            {"stage3_gather_fp16_weights_on_model_save": True, "sub_group_size": 5},
            {"stage3_gather_16bit_weights_on_model_save": True, "sub_group_size": 5},
        ),
    ],
)
def test_other_names_become_those_that_a_search_sets(
    own: dict[str, Any], current: dict[str, Any], tmp_path: Path
) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, **own}}))
    found = read(path)["zero_optimization"]
    assert found == {"stage": 3, **current}
    one, other = DeepSpeedZeroConfig(**found), DeepSpeedZeroConfig(stage=3, **own)
    for name in DeepSpeedZeroConfig.model_fields.keys() - own.keys():
        assert getattr(one, name) == getattr(other, name), name


def test_every_other_name_is_known() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    aliases = {name: field.alias for name, field in fields.items() if field.alias}
    assert normalize({"zero_optimization": dict.fromkeys(aliases, 1)}) == {
        "zero_optimization": dict.fromkeys(aliases.values(), 1)
    }
    both = {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}}
    assert normalize(both) == both, "which DeepSpeed refuses"


@pytest.mark.parametrize("size", [None, "auto", 0, 500_000_000, 5e8, "500000000"])
def test_sizes_that_deepspeed_takes_are_taken(size: object) -> None:
    config = normalize({"zero_optimization": {"reduce_bucket_size": size}})
    check_sections(config, where="ds.json")


@pytest.mark.parametrize(
    "text",
    [
        *("1", "On", "TRUE", "y", "0", "off", "False", "no", "5", "maybe"),
        *("500_000_000", "5e8", "500000000.0", "5.", "5.5", " +05 ", "5_", "_5", "5__0", "\u0665"),
    ],
)
def test_text_is_read_as_deepspeed_reads_it(text: str) -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for name, key, model in (
        ("tensor_parallel", "autotp_size", TPTrainingConfig),
        ("zero_optimization", "overlap_comm", DeepSpeedZeroConfig),
        ("zero_optimization", "sub_group_size", DeepSpeedZeroConfig),
        ("bf16", "enabled", DeepSpeedBF16Config),
    ):
        found = normalize({name: {key: text}})[name][key]
        try:
            expected = getattr(model(**{key: text}), key)
        except ValueError:  # DeepSpeed refuses it
            expected = text
        assert found == expected and type(found) is type(expected)


def test_predictions_know_settings_that_are_text() -> None:
    facts = facts_of(10**9)
    text = {"stage": 2, "reduce_bucket_size": "50000000", "overlap_comm": "true"}
    typed = {"stage": 2, "reduce_bucket_size": 50_000_000, "overlap_comm": True}
    configs = [
        normalize({"fp16": {"enabled": enabled}, "zero_optimization": zero})
        for enabled, zero in (("true", text), (1, typed), (True, typed))
    ]
    one, *others = [closed_form.estimate(facts, c, slots=2, micro_batch=1) for c in configs]
    assert others == [one, one]


def test_merge_lays_one_over_the_other() -> None:
    before = copy.deepcopy(NESTED)
    overrides: dict[str, Any] = {
        "optimizer": {"params": {"betas": [0.5]}},
        "steps_per_print": {"a": 1},
        "fp16": {},
    }
    given = copy.deepcopy(overrides)
    merged = merge(NESTED, overrides)
    assert merged == {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.5]}},
        "zero_optimization": NESTED["zero_optimization"],
        "steps_per_print": {"a": 1},
        "fp16": {},
    }
    merged["zero_optimization"]["offload_optimizer"]["device"] = "nvme"
    merged["steps_per_print"]["a"] = merged["fp16"]["enabled"] = 2
    merged["optimizer"]["params"]["betas"].append(9)
    assert before == NESTED and given == overrides, "it shares nothing with its arguments"


# -- batch sizes


@pytest.mark.parametrize(
    ("total", "micro", "gas", "slots", "expected"),
    [
        (32, 4, 4, 2, (32, 4, 4)),
        (32, 4, None, 2, (32, 4, 4)),
        (32, None, 4, 2, (32, 4, 4)),
        (None, 4, 4, 2, (32, 4, 4)),
        (32, None, None, 2, (32, 16, 1)),
        (None, 4, None, 2, (8, 4, 1)),
        (1, None, None, 1, (1, 1, 1)),
        (32, "auto", "auto", 2, (32, 16, 1)),
        ("auto", 4, "auto", 2, (8, 4, 1)),
        (32, 4, "auto", 1, (32, 4, 8)),
    ],
)
def test_batch_sizes_are_derived_as_deepspeed_does(
    tmp_path: Path, total: object, micro: object, gas: object, slots: int, expected: tuple[int, ...]
) -> None:
    given = dict(zip(BATCH_KEYS, (total, micro, gas), strict=True))
    absent = {key: value for key, value in given.items() if value is not None}
    for config in (given, absent):
        batch = Reader(User(tmp_path), slots).command_line(config, "--slots", slots)["own_batch"]
        assert (batch["train_batch_size"], batch["micro_batch"], batch["gas"]) == expected


@pytest.mark.parametrize(
    ("config", "expected", "sizes"),
    [
        # DeepSpeed counts data-parallel groups under Ulysses, and all ranks under AutoTP.
        ({"sequence_parallel_size": 2}, (8, 4, 1), (1, 2)),
        ({"tensor_parallel": {"autotp_size": 2}}, (4, 2, 1), (2, 1)),
        ({"tensor_parallel": {"autotp_size": 0}}, (8, 2, 1), (1, 1)),
        ({"tensor_parallel": {"autotp_size": "2"}}, (4, 2, 1), (2, 1)),
        ({"tensor_parallel": {"autotp_size": 2.0}}, (4, 2, 1), (2, 1)),
    ],
)
def test_slots_that_share_samples_do_not_multiply_them(
    tmp_path: Path,
    config: dict[str, Any],
    expected: tuple[int, ...],
    sizes: tuple[int, int],
) -> None:
    reader = Reader(User(tmp_path))
    batch = reader.command_line({**config, "train_batch_size": 8}, "--slots", 4)["own_batch"]
    assert (batch["train_batch_size"], batch["micro_batch"], batch["gas"]) == expected
    assert batch["parallelism"] == {"tensor": sizes[0], "sequence": sizes[1]}


@pytest.mark.parametrize(
    ("zero", "refused"),
    [
        ({"stage": 3, "zero_hpz_partition_size": 3}, True),
        ({"stage": 3, "zero_hpz_partition_size": "6"}, True),
        ({"stage": 3, "zero_hpz_partition_size": 4}, False),
        ({"stage": 3, "zero_hpz_partition_size": 12}, False),  # counts as 8
        ({"stage": 2, "zero_hpz_partition_size": 3}, False),
    ],
)
def test_a_secondary_partition_divides_the_devices(
    user: User, zero: dict[str, Any], refused: bool
) -> None:
    user.world = World(slots=8)
    user.has({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    told = user.tunes("--dry-run")
    assert told.status == (2 if refused else 0), told.err
    assert ("does not divide the 8 devices" in told.err) is refused


# -- the rest


def test_equal_configurations_have_equal_fingerprints() -> None:
    one: dict[str, Any] = {"a": 1, "b": {"c": [1, 2], "d": True}}
    same = {"b": {"d": True, "c": [1, 2]}, "a": 1}
    assert fingerprint(one) == fingerprint(same)
    others: list[dict[str, Any]] = [
        {"a": 1, "b": {"c": [2, 1], "d": True}},
        {"a": "1", "b": {"c": [1, 2], "d": True}},
    ]
    assert fingerprint(one) not in map(fingerprint, others)
