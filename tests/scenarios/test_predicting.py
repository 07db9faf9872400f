"""`dsat estimate` and `dsat project`: sizes, exit statuses, advice and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dsat
from dsat.command.ds_config import BATCH_KEYS
from testing import warm_command, warm_host
from testing.scenarios import User
from testing.started import Told

GIB = 2**30
LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
OWN_BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
TOTAL = ("--to", "8xH100", "--train-batch-size")
AUTOTP = {"tensor_parallel": {"autotp_size": 2}}
AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
MIDDLE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate in forks of a process that has imported torch and DeepSpeed."""
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)


def estimate(user: User, model: dict[str, Any], *words: object, status: int = 0) -> Told:
    (user.folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    told = user.types("estimate", "--model", "config.json", "--json", *words)
    assert told.status == status, told.err
    return told


def lines(told: Told) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of the table by strategy and number of slots."""
    return {(line["strategy"], line["slots"]): line for line in told.json["lines"]}


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_states_are_divided_as_zero_divides_them(user: User) -> None:
    """Rajbhandari et al. (2020): 2 + 2 + 12 bytes per parameter; offloaded ones are on the host."""
    sizes = ("--slot-memory", "80GiB", "--host-memory", "2TiB", "--seq-length", 128)
    told = estimate(user, LLAMA_7B, "--formula", "--slots", 8, 64, *sizes)
    found, size = lines(told), 6_738_415_616
    assert told.json["model"]["num_params"] == size, "as published"
    for strategy, divided in (("z1", 12), ("z2", 12), ("z3", 14)):
        few, many = (found[strategy, slots]["memory"]["forward"] for slots in (8, 64))
        assert few - many == pytest.approx(divided * size * (1 / 8 - 1 / 64), rel=0.2), strategy
    host = found["z2_offload", 8]["memory"]
    assert host["host_pageable"] * 8 / size == pytest.approx(8, rel=0.01), "both moments in fp32"
    assert 4 < host["host_pinned"] * 8 / size < 16
    assert found["z2_offload", 8]["peak_bytes"] < found["z2", 8]["peak_bytes"]
    largest = {slots: found["z3", slots]["largest_micro_batch"][str(80 * GIB)] for slots in (8, 64)}
    assert 0 < largest[8] < largest[64]


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_options_of_the_model_change_what_it_needs(user: User) -> None:
    def peak(*words: object) -> int:
        line = lines(estimate(user, TINY, "--slots", 1, *words))["z0", 1]
        return int(line["peak_bytes"])

    usual = peak("--seq-length", 256, "--formula")
    assert peak("--seq-length", 512, "--formula") > usual
    with_lora = peak("--seq-length", 256, "--lora", "r=1", "--formula")
    assert usual - with_lora > 12 * 2_000_000, "states"
    assert peak("--seq-length", 256, "--dtype", "fp16", "--exact") == pytest.approx(usual, rel=0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("dtype", "section"),
    [("bf16", {"bf16": {"enabled": True}}), ("fp32", {}), ("fp32", {"torch_autocast": AUTOCAST})],
)
def test_parameters_have_the_type_of_the_users_file(
    user: User, dtype: str, section: dict[str, Any]
) -> None:
    own = {"train_micro_batch_size_per_gpu": 1, **section}
    (user.folder / "own.json").write_text(json.dumps(own))
    words = ("--ds-config", "own.json", "--formula", "--seq-length", 128)
    told = estimate(user, TINY, *words, "--fits", "1x16GiB")
    assert told.json["dtype"] == dtype
    table = estimate(user, TINY, *words, "--slots", 1).json
    assert (table["dtype"], table["model"]["param_bytes"]) == (dtype, int(dtype[2:]) // 8)
    assert f" in {dtype}, " in user.types("estimate", "--model", "config.json", *words).out


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_an_optimizer_that_deepspeed_has_for_no_cpu_is_simulated(user: User) -> None:
    lion = {"type": "Lion", "params": {"lr": 1e-4}}
    own = {"train_micro_batch_size_per_gpu": 1, "optimizer": lion}
    (user.folder / "own.json").write_text(json.dumps(own))
    words = ("--ds-config", "own.json", "--fits", "1x16GiB", "--seq-length", 128)
    assert estimate(user, TINY, *words).json["fits"]


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("gpus", "fits"), [("1x16GiB/1GiB", True), ("1x50MiB", False), ("1x16GiB/1MiB", False)]
)
def test_a_job_is_guarded_by_the_exit_status(user: User, gpus: str, fits: bool) -> None:
    (user.folder / "own.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    words = ("--ds-config", "own.json", "--fits", gpus, "--seq-length", 128)
    told = estimate(user, TINY, *words, status=0 if fits else 1)
    assert told.json["fits"] is fits
    enough = told.json["needed_bytes"] < told.json["gpu_bytes"]
    limit = told.json["host_limit"]
    assert (enough and (limit is None or told.json["host_bytes"] < limit)) is fits


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_a_gpu_has_its_memory_by_name(user: User) -> None:
    """An H100 is sold with "80 GB", which are 80 GiB."""
    (user.folder / "own.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    words = ("--ds-config", "own.json", "--seq-length", 128)
    told = estimate(user, TINY, *words, "--fits", "8xH100/1TiB")
    assert (told.json["slots"], told.json["gpu_bytes"]) == (8, 80 * GIB)
    assert told.json["host_limit"] == 1024 * GIB
    other = estimate(user, TINY, *words, "--fits", "2Xrtx-4090", "--formula")
    assert (other.json["slots"], other.json["gpu_bytes"]) == (2, 24 * GIB)
    formula = estimate(user, TINY, *words, "--fits", "8xH100/1TiB", "--formula")
    assert formula.json["fits"] and "simulating" not in formula.err
    assert formula.json["needed_bytes"] == pytest.approx(told.json["needed_bytes"], rel=0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("x",), "--fits"),
        (("8x",), "--fits"),
        (("8xFoo",), "H100"),
        (("1x24GiB/1TiB", "--host-memory", "2TiB"), "--host-memory"),
    ],
)
def test_gpus_that_cannot_be_read_are_no_answer(
    user: User, words: tuple[str, ...], said: str
) -> None:
    assert said in estimate(user, TINY, "--fits", *words, status=2).err


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_the_api_estimates_the_same(user: User) -> None:
    (user.folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    words = ("--slots", 8, "--slot-memory", "24GiB", "--formula")
    path = str(user.folder / "config.json")
    shown = user.types("estimate", "--model", path, *words)
    found = dsat.estimate(model=path, devices=8, slot_memory=["24GiB"], formula=True)
    assert found.lines and str(found) in shown.out


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_a_model_without_a_configuration_is_checked_in_a_strategy_that_fits(user: User) -> None:
    """In stage 0, the states of 7 billion parameters need 100 GiB."""
    told = estimate(user, LLAMA_7B, "--fits", "8x60GiB", "--seq-length", 512)
    assert told.json["fits"] and told.json["strategy"] != "z0"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_as_many_gpus_as_are_said_to_be_enough_are(user: User) -> None:
    words = ("--seq-length", 2048, "--formula", "--fits")
    told = estimate(user, LLAMA_7B, *words, "1x6GiB", status=1)
    enough = int(told.json["ways_out"][0].removeprefix("at least ").split()[0])
    assert enough > 1
    assert estimate(user, LLAMA_7B, *words, f"{enough}x6GiB").json["fits"]
    estimate(user, LLAMA_7B, *words, f"{enough - 1}x6GiB", status=1)


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [("1x16GiB", []), ("1x150MiB", ["activation checkpointing"])],
)
def test_what_dsat_adds_to_fit_is_named(user: User, gpus: str, chosen: list[str]) -> None:
    """Without a user's configuration, dsat chooses a strategy and whatever else is needed."""
    model = {**TINY, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    told = estimate(user, model, "--seq-length", 2048, "--fits", gpus)
    assert told.json["fits"] and told.json["chosen"] == chosen


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("gpus", "strategy", "chosen"),
    [("4x2000MiB", "z1", ["activation checkpointing"]), ("2x2000MiB", "z2_offload", [])],
)
def test_activations_are_recomputed_before_anything_is_offloaded(
    user: User, gpus: str, strategy: str, chosen: list[str]
) -> None:
    model = {**TINY, **MIDDLE, "max_position_embeddings": 2048}
    told = estimate(user, model, "--seq-length", 1536, "--formula", "--fits", gpus)
    assert told.json["fits"]
    assert (told.json["strategy"], told.json["chosen"]) == (strategy, chosen)


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_activations_are_recomputed_before_parameters_are_offloaded(user: User) -> None:
    of_8b = {"num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256}
    words = ("--seq-length", 2048, "--formula", "--fits", "2x24GB")
    told = estimate(user, {**LLAMA_7B, **of_8b}, *words)
    chosen = ["activation checkpointing"]
    assert (told.json["strategy"], told.json["chosen"]) == ("z3_offload", chosen)


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_if_the_simulation_refuses_what_the_formula_chose_the_next_is_tried(user: User) -> None:
    """Without offloading, 0.1 B in stage 2 need 1.35 GiB by the formula, but 1.47 simulated."""
    words = ("--seq-length", 128, "--fits", "8x1600MB")
    formula = estimate(user, TINY | MIDDLE, *words, "--formula")
    assert (formula.json["fits"], formula.json["strategy"]) == (True, "z2")
    told = estimate(user, TINY | MIDDLE, *words)
    assert (told.json["fits"], told.json["strategy"]) == (True, "z2_offload")


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("gpus", "more", "ways"),
    [
        ("1x60MiB", (), ["Use larger GPUs, or training only adapters (--lora"]),
        ("2x2MiB", (), ["Use larger GPUs."]),
        ("2x2MiB/1MiB", (), ["Use larger GPUs.", "host lacks"]),
        ("2x2MiB", ("--activation-checkpointing", "off"), ["Use larger GPUs, or activation"]),
    ],
)
def test_if_no_strategy_fits_the_ways_out_are_named(
    user: User, gpus: str, more: tuple[str, ...], ways: list[str]
) -> None:
    words = ("--fits", gpus, "--seq-length", 128, "--formula", *more)
    told = estimate(user, TINY, *words, status=1)
    assert not told.json["fits"]
    assert ("activation checkpointing" in told.json["chosen"]) is not bool(more)
    path = str(user.folder / "config.json")
    shown = user.types("estimate", "--model", path, *words).out
    assert [way for way in (*ways, *told.json["chosen"]) if way not in shown] == []
    assert " lacks " in shown and "nvme" not in shown and "pin_memory" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_nvme_is_advised_where_only_the_host_lacks_memory_and_can_be_simulated(user: User) -> None:
    """Without offloading, stage 3 needs 2.1 GiB of each of two devices; with it, 1.3."""
    model, devices = TINY | MIDDLE, ("--seq-length", 128, "--fits", "2x1700MB/1MiB")
    refused = estimate(user, model, *devices, "--formula", status=1)
    assert [way for way in refused.json["ways_out"] if "nvme" in way]
    nvme = {"device": "nvme", "nvme_path": str(user.folder)}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    own = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    (user.folder / "own.json").write_text(json.dumps({**own, "zero_optimization": zero}))
    told = estimate(user, model, *devices, "--ds-config", "own.json")
    assert (told.json["fits"], told.json["host_bytes"]) == (True, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_a_projection_has_16384_tokens_a_gpu_by_default(user: User) -> None:
    (user.folder / "transformers.py").write_text("raise ImportError('not of this folder')")
    (user.folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    words = ("--seq-length", 128, "--to", "8xA100-40GB", "--json")
    told = user.types("project", "--model", "config.json", *words)
    assert told.status == 0, told.err
    assert told.json["dtype"] == "bf16"
    rows = told.json["best"]["8"]
    assert {row["train_batch_size"] for row in rows} == {8 * 16_384 // 128}


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_the_longest_sequence_of_a_speech_decoder_has_its_positions(user: User) -> None:
    sizes = {"d_model": 384, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 52_000}
    config = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    words = ("--slots", 1, "--slot-memory", "80GiB", "--formula")
    found = estimate(user, {**config, **sizes, "max_target_positions": 96}, *words)
    assert {96} == {t for line in found.json["lines"] for t in line["longest_sequence"].values()}


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    ("config", "options", "batch"),
    [
        pytest.param(dict.fromkeys(BATCH_KEYS, "auto"), (), (1024, 1, 128), id="the default"),
        pytest.param(OWN_BATCH, (*TOTAL, 1024), (1024, 4, 32), id="of the option"),
        pytest.param(OWN_BATCH, (*TOTAL, 48), (48, 3, 2), id="without its micro batch"),
        pytest.param(
            OWN_BATCH | AUTOTP, (*TOTAL, 512), (512, 4, 32), id="of the option with AutoTP"
        ),
    ],
)
def test_a_projection_has_the_batch_that_the_user_gives(
    config: dict[str, Any], options: tuple[Any, ...], batch: tuple[int, int, int], user: User
) -> None:
    (user.folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    (user.folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    words = ("--model", "config.json", "--ds-config", "ds.json", "--seq-length", 128, "--json")
    told = user.types("project", *words, *options)
    assert told.status == 0, told.err
    own = next(row for row in told.json["own"] if row["gpus"] == 8)
    assert (own["train_batch_size"], own["micro_batch"]) == batch[:2]
    assert own["gradient_accumulation_steps"] == batch[2]
    assert {row["train_batch_size"] for row in told.json["best"]["8"]} == {batch[0]}


@pytest.mark.slow
@pytest.mark.usefixtures("imported")
def test_a_model_is_projected_to_other_gpus(user: User) -> None:
    path = Path(user.folder / "config.json")
    path.write_text(json.dumps(TINY), encoding="utf-8")
    told = user.types(
        *("project", "--model", "config.json", "--seq-length", 128, "--to", "16XA100-40GB"),
        *("--activation-checkpointing", "on", "--train-batch-size", 64),
        *("--tokens", "1B", "--price", 2, "--network", 100, "--json"),
    )
    assert told.status == 0, told.err
    assert (told.json["gpus"], told.json["gpu"], told.json["not_simulated"]) == (
        *(16, "A100-40GB"),
        {},
    )
    assert {row["train_batch_size"] for rows in told.json["best"].values() for row in rows} == {64}
    for rows in told.json["best"].values():
        low, high = rows[0]["interval_90"]
        assert 0 < low < rows[0]["samples_per_second"] < high
        assert sum(rows[0]["parts_s"].values()) == pytest.approx(rows[0]["step_s"])
        hours = 1e9 / (128 * rows[0]["samples_per_second"]) / 3600 * rows[0]["gpus"]
        assert rows[0]["training"]["gpu_hours"] == pytest.approx(hours, rel=0.01)
        assert rows[0]["training"]["cost"] == pytest.approx(2 * hours, rel=0.01)
    rates = [rows[0]["samples_per_second"] for rows in told.json["best"].values()]
    assert max(rates) > rates[0], "more GPUs share the same batch"
    user.tunes("--max-trials", 4, "--finals", 0, method="random")
    other = user.types("project", "--model", "config.json", "--from-run", "run")
    assert other.status == 2 and "another model" in other.err
    recorded = Path(dsat.__file__).parents[1] / "testing" / "recorded_run"
    on_cores = user.types("project", "--model", "config.json", "--from-run", recorded)
    assert on_cores.status == 2 and "was measured on CPU cores" in on_cores.err
