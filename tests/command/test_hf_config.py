"""Finding a model's configuration without downloading anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from dsat.command import hf_config
from dsat.command.ds_config import BATCH_KEYS

AUTO = {"enabled": "auto"}


@pytest.mark.parametrize(
    ("dtype", "given", "trained"),
    [
        ("fp32", {}, "fp32"),
        ("fp16", {"bf16": AUTO, "fp16": AUTO}, "fp16"),
        ("bf16", {"fp16": {"enabled": True}}, "fp16"),
        ("fp16", {"bf16": {"enabled": True}, "fp16": AUTO}, "bf16"),
        ("bf16", {"bf16": {"enabled": False}}, "fp32"),
        ("bf16", {"fp16": {"loss_scale": 0}}, "bf16"),
    ],
)
def test_the_users_file_decides_what_is_trained(
    dtype: str, given: Mapping[str, Any], trained: str
) -> None:
    config = hf_config.ds_config(dtype, {**given, "gradient_clipping": "auto"})
    assert hf_config.dtype_of(config) == trained
    assert [config[name]["enabled"] for name in ("bf16", "fp16")].count(True) <= 1


def test_what_a_trainer_would_fill_in_is_left_to_deepspeed() -> None:
    given = {
        **dict.fromkeys((*BATCH_KEYS, "gradient_clipping"), "auto"),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto"},
    }
    config = hf_config.ds_config("bf16", given)
    assert "auto" not in json.dumps(config)
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-4}}
    assert config["zero_optimization"] == {"stage": 3}
    assert [config.get(key) for key in BATCH_KEYS] == [None, 1, 1]


def test_what_a_trainer_computes_from_the_hidden_size_is_computed() -> None:
    """Sizes by `HfTrainerDeepSpeedConfig.trainer_config_finalize`."""
    computed = {
        "reduce_bucket_size": 10**6,
        "stage3_prefetch_bucket_size": 900_000,
        "stage3_param_persistence_threshold": 10_000,
    }
    given = {"zero_optimization": {"stage": 3, **dict.fromkeys(computed, "auto")}}
    config = hf_config.ds_config("bf16", given)
    found = hf_config.with_buckets(config, 1000)
    assert found == {**config, "zero_optimization": {"stage": 3, **computed}}
    own = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5}}
    assert hf_config.with_buckets(own, 1000) == own
    assert hf_config.with_buckets(given, None) == given
