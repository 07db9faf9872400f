"""Every kind of failure, in every place: exit status, blame, and recommendation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import User
from testing.started import Told
from testing.world import A100, GIB, GPT_300M, Failure, Model, World
from tests.scenarios.checks import (
    EACH_METHOD,
    METHODS,
    best_speed,
    check_result,
    micro_batches,
    of_kind,
    paired,
)

KINDS = ("OOM", "HOST_OOM", "ERROR", "TIMEOUT", "INVALID", "DIVERGED", "CANCELED")
EVERY_KIND = [("model", kind) for kind in KINDS]
MICRO = "train_micro_batch_size_per_gpu"
OWN = 4  # micro batch
LARGE = Model(layers=48, hidden=4096, tokens=1024, vocabulary=50304)


def tuned(
    folder: Path,
    *failures: Failure,
    method: str = "model",
    trials: int = 16,
    own: Mapping[str, Any] | None = None,
    options: tuple[Any, ...] = (),
    **world: Any,
) -> tuple[User, Told]:
    """Tune a script whose own micro batch is `OWN`."""
    user = User(folder, World(failures=failures, **world))
    user.has(own or {"train_micro_batch_size_per_gpu": OWN})
    return user, user.tunes("--max-trials", trials, *options, method=method)


def check_own_is_kept(user: User, told: Told) -> None:
    assert told.status == 0 and told.best["kind"] == "baseline", told.json["verdict"]
    assert told.json["gain"] == 1.0 and "Keep your configuration" in told.json["verdict"][0]
    assert user.best_config()["train_micro_batch_size_per_gpu"] == OWN


def blamed(told: Told) -> str:
    """Return the error message with which a command ended."""
    assert told.status in (1, 2) and "Traceback" not in told.err
    return told.err[told.err.index("dsat: error: ") :]


def best_of(user: User, method: str, largest: int) -> float:
    """Return the best speed up to a micro batch; a grid has only powers of two."""
    sizes = [1, 2, 4, 8, 16, 32] if method == "gridsearch" else range(1, 65)
    return best_speed(user.world, sizes=[size for size in sizes if size <= largest])


# -- the user's own configuration


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "INVALID"])
def test_another_configuration_is_found_where_ones_own_fails(tmp_path: Path, kind: str) -> None:
    user, told = tuned(tmp_path, Failure(kind, {"kind": "baseline"}, "it broke"))
    check_result(user, told)
    baseline, profile, *_ = told.trials
    assert baseline["outcome"] == kind and told.json["gain"] is None
    assert profile["kind"] == "profile" and profile["train_micro_batch_size_per_gpu"] == 1
    assert not of_kind(told, "final"), "there is nothing to compare with"
    headline = told.json["verdict"][0]
    assert "runs out of memory" in headline if "OOM" in kind else "it broke" in headline
    if "OOM" not in kind:
        assert user.true_speed(user.best_config()) > 0.93 * best_speed(user.world)


@pytest.mark.parametrize(
    "failure",
    [
        Failure("ERROR", {}, "NameError: x", before_engine=True),
        Failure("INVALID", {}, "the script never calls deepspeed.initialize"),
    ],
    ids=["before the engine", "nothing to measure"],
)
def test_what_fails_whatever_the_configuration_ends_at_once(
    tmp_path: Path, failure: Failure
) -> None:
    _, told = tuned(tmp_path, failure)
    assert len(told.trials) == 1 and failure.message in blamed(told)
    assert "your own configuration" in told.json["stop_reason"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_always_fails_ends_soon_with_its_own_message(
    tmp_path: Path, kind: str
) -> None:
    _, told = tuned(tmp_path, Failure(kind, {}, "it broke"))
    assert "it broke" in blamed(told)
    assert told.json["best"] is None and told.json["best_ds_config"] is None
    assert {row["outcome"] for row in told.trials} == {kind}
    if "OOM" in kind:  # every way to save memory was tried
        strategies = [row["name"].split("_gas")[0] for row in told.trials]
        assert strategies[-1] == "profile_z3_offload_param" and len(told.trials) <= 6
    else:
        assert len(told.trials) <= 2


@pytest.mark.parametrize(
    ("frame", "steps", "ends"),
    [
        ("/home/me/train.py", 3, True),
        ("/home/me/train.py", 0, False),
        ("/venv/lib/python3.12/site-packages/torch/nn/functional.py", 3, False),
        ("/src/DeepSpeed/deepspeed/runtime/zero/stage3.py", 3, False),
        ("/usr/lib/python3.11/threading.py", 3, False),
        ("<string>", 3, False),
    ],
)
def test_a_script_that_fails_after_its_first_steps_ends_at_once(
    tmp_path: Path, frame: str, steps: int, ends: bool
) -> None:
    detail = f'  File "{frame}", line 9, in step\nRuntimeError: bad batch\n'
    late = Failure("ERROR", {"kind": ["baseline", "search"]}, "bad batch", detail)
    _, told = tuned(tmp_path, replace(late, completed_steps=steps))
    assert "bad batch" in blamed(told) and (len(told.trials) == 1) is ends
    assert ("after 3 optimizer steps" in blamed(told)) is bool(steps)


def test_what_deepspeed_refuses_at_stage_0_is_tried_with_the_other_stages(tmp_path: Path) -> None:
    frames = '  File "train.py", line 3\n  File "/x/deepspeed/runtime/engine.py", line 9\n'
    for where, ends in (({"stage": 0}, False), ({}, True)):
        refused = Failure("ERROR", where, "not at stage 0", detail=frames)
        user, told = tuned(tmp_path / str(ends), refused)
        if ends:
            assert "not at stage 0" in blamed(told) and told.trials[-1]["stage"] > 0
        else:
            check_result(user, told)
            assert {row["stage"] for row in told.trials[1:]} == {1, 2, 3}


# -- memory


@pytest.mark.parametrize(
    ("gib", "zero", "named"),
    [
        (8, {"stage": 2}, True),  # of 500 million elements, in two bytes each
        (40, {"stage": 2}, False),
        (24, {"stage": 2, "overlap_comm": True}, True),  # twice
        (8, {"stage": 2, "reduce_bucket_size": 5 * 10**8}, False),
        (8, {"stage": 0}, False),
    ],
)
def test_a_large_default_bucket_is_named_where_memory_does_not_suffice(
    tmp_path: Path, gib: int, zero: dict[str, Any], named: bool
) -> None:
    own = {"train_micro_batch_size_per_gpu": OWN, "zero_optimization": zero}
    gpu = replace(A100, memory_bytes=gib * GIB)
    model = replace(GPT_300M, layers=4)
    lost = Failure("OOM", {"kind": "baseline"}, "out of memory")
    _, told = tuned(tmp_path, lost, own=own, trials=4, gpu=gpu, model=model)
    headline = told.json["verdict"][0]
    assert "runs out of memory" in headline
    assert ("reduce_bucket_size of 500,000,000" in headline) is named


@pytest.mark.parametrize(
    ("model", "slots", "host", "expected"),
    [
        (replace(LARGE, layers=32), 1, 400, {"z3_offload", "z3_offload_param"}),
        (replace(LARGE, layers=10), 2, 400, {"z1", "z2", "z2_offload", "z3", "z3_offload"}),
        (LARGE, 8, 400, {"z3", "z3_offload", "z3_offload_param", "z2_offload"}),
    ],
)
@pytest.mark.parametrize("method", ["model", "asha"])
def test_a_model_that_does_not_fit_climbs_to_what_saves_memory(
    tmp_path: Path, method: str, model: Model, slots: int, host: int, expected: set[str]
) -> None:
    world: dict[str, Any] = {"model": model, "slots": slots, "host_memory_bytes": host * GIB}
    user, told = tuned(tmp_path, method=method, trials=24, **world)
    check_result(user, told)
    assert told.trials[0]["outcome"] == "OOM" and told.json["gain"] is None
    assert told.best["name"].split("_gas")[0] in expected
    searched = of_kind(told, "search")
    assert any(row["outcome"] == "OK" for row in searched)


def test_a_model_that_fits_nowhere_says_what_would_help(tmp_path: Path) -> None:
    world: dict[str, Any] = {"model": replace(LARGE, hidden=12288), "host_memory_bytes": GIB}
    _, told = tuned(tmp_path, **world)
    said = blamed(told)
    assert "Use activation checkpointing, more devices" in said
    assert "does not fit" in said and ("--nvme-path" in said or "host memory" in said)
    assert all(row["outcome"] in ("OOM", "HOST_OOM") for row in told.trials)


@pytest.mark.parametrize(("method", "largest"), paired(2, 10))
def test_memory_that_ends_earlier_than_predicted_is_found_out(
    tmp_path: Path, method: str, largest: int
) -> None:
    """Another program uses the device: nothing above `largest` runs."""
    above = list(range(largest + 1, 200))
    failure = Failure("OOM", {"micro_batch": above}, "taken by others")
    own = {"train_micro_batch_size_per_gpu": 1}
    user, told = tuned(tmp_path, failure, method=method, own=own, trials=24)
    check_result(user, told)
    assert user.true_speed(user.best_config()) > 0.93 * best_of(user, method, largest)
    lost = sum(row["outcome"] == "OOM" for row in told.trials)
    assert lost < len(of_kind(told, "search"))


@pytest.mark.parametrize(("method", "largest"), paired(6, 17))
def test_errors_of_large_micro_batches_lead_to_smaller_ones(
    tmp_path: Path, method: str, largest: int
) -> None:
    """The script fails with an exception of its own above `largest`, in words of its own."""
    failures = [
        Failure("ERROR", {"micro_batch": size}, f"AssertionError: {size} samples are too many")
        for size in range(largest + 1, 200)
    ]
    user, told = tuned(tmp_path, *failures, method=method, trials=24)
    check_result(user, told)
    ran = [row for row in told.trials if row["outcome"] == "OK"]
    reached = 16 if method == "gridsearch" and largest == 17 else largest
    assert max(micro_batches(ran)) == reached and len(told.trials) - len(ran) <= 7
    assert user.true_speed(user.best_config()) > 0.93 * best_of(user, method, largest)


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_single_failure_for_other_reasons_costs_one_trial(tmp_path: Path, method: str) -> None:
    user, told = tuned(tmp_path, Failure("OOM", {"trial": 2}, "a neighbour"), method=method)
    check_result(user, told)
    assert sum(row["outcome"] == "OOM" for row in told.trials) == 1
    assert user.true_speed(user.best_config()) > 0.9 * best_speed(user.world)


@pytest.mark.parametrize(("method", "seen"), paired(0.5, 2.0))
def test_wrong_predictions_are_corrected_by_what_trials_use(
    tmp_path: Path, method: str, seen: float
) -> None:
    """The profile shows half or twice the true activation memory."""
    options = ("--finals", 0, "--stop-when", 0) if method == "model" else ("--finals", 0)
    user, told = tuned(tmp_path, method=method, trials=20, options=options, seen_activations=seen)
    check_result(user, told)
    assert sum(row["outcome"] == "OOM" for row in told.trials) <= 3
    last = [row for row in of_kind(told, "search") if row["outcome"] == "OK"][-1]
    assert last["predicted_bytes"] == pytest.approx(last["used_bytes"], rel=0.15)
    measured = (row["metrics"]["throughput"] for row in told.trials if row["outcome"] == "OK")
    assert max(measured) > 0.93 * best_of(user, method, 64)


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_prediction_that_nothing_fits_is_not_believed(tmp_path: Path, method: str) -> None:
    """The first trial ran, on a machine that does not report used memory."""
    world: dict[str, Any] = {"seen_activations": 60.0, "tells_memory": False}
    user, told = tuned(tmp_path, method=method, **world)
    check_result(user, told)
    assert len(of_kind(told, "search")) >= 2
    assert all(row["predicted_bytes"] is None for row in told.trials)


# -- the search


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), [*EVERY_KIND, ("asha", "OOM"), ("random", "OOM")])
def test_a_strategy_that_fails_leaves_the_others(tmp_path: Path, method: str, kind: str) -> None:
    failure = Failure(kind, {"strategy": "z1"}, "not in stage 1")
    user, told = tuned(tmp_path, failure, method=method)
    check_result(user, told)
    assert told.best["stage"] != 1
    assert {row["outcome"] for row in told.trials if row["stage"] == 1} <= {kind}
    assert user.true_speed(user.best_config()) > 0.93 * best_speed(user.world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"), [*EVERY_KIND, *((method, "ERROR") for method in METHODS[1:])]
)
def test_if_nothing_else_runs_ones_own_is_kept_and_it_is_said_why(
    tmp_path: Path, method: str, kind: str
) -> None:
    user, told = tuned(tmp_path, Failure(kind, {"kind": "search"}, "no folder"), method=method)
    check_own_is_kept(user, told)
    failed = of_kind(told, "search")
    assert failed and {row["outcome"] for row in failed} == {kind}
    warning = "\n".join(told.json["verdict"])
    assert "no folder" in warning and kind in warning and str(len(failed)) in warning


@pytest.mark.parametrize(("kind", "ends"), [("ERROR", True), ("INVALID", True), ("OOM", False)])
def test_a_search_ends_early_where_everything_fails_for_no_want_of_memory(
    tmp_path: Path, kind: str, ends: bool
) -> None:
    _, told = tuned(
        tmp_path,
        Failure("ERROR", {"kind": "baseline"}, "once"),
        Failure(kind, {"kind": "search"}, "again"),
        method="random",
        trials=24,
    )
    assert told.status == 1
    assert ("every trial failed" in told.json["stop_reason"]) is ends
    assert (len(told.trials) <= 6) is ends


@pytest.mark.parametrize("method", METHODS[1:])
def test_strategies_in_which_everything_fails_are_abandoned(tmp_path: Path, method: str) -> None:
    failure = Failure("ERROR", {"stage": [1, 2, 3]}, "no collective")
    user, told = tuned(tmp_path, failure, method=method, trials=50)
    check_result(user, told)
    assert Counter(row["stage"] for row in told.trials if row["outcome"] == "ERROR")[3] <= 4
    assert "none ran" in told.json["stop_reason"] and len(told.trials) < 30


@pytest.mark.parametrize(("method", "samples"), paired(6, 17))
def test_nothing_larger_than_the_data_is_recommended(
    tmp_path: Path, method: str, samples: int
) -> None:
    user, told = tuned(tmp_path, method=method, trials=20, samples=samples)
    check_result(user, told)
    larger = [row for row in told.trials if row["train_micro_batch_size_per_gpu"] > samples]
    assert all(row["outcome"] == "INVALID" for row in larger) and len(larger) <= 4
    assert told.best["train_micro_batch_size_per_gpu"] <= samples
    assert user.true_speed(user.best_config()) > 0.93 * best_of(user, method, samples)


@pytest.mark.parametrize("method", EACH_METHOD)
def test_what_the_data_loader_tells_costs_no_failed_trial(tmp_path: Path, method: str) -> None:
    user, told = tuned(tmp_path, method=method, samples=17, tells_samples=True)
    check_result(user, told)
    assert all(row["outcome"] != "INVALID" for row in told.trials)
    assert max(micro_batches(told.trials)) <= 17


@pytest.mark.parametrize("method", EACH_METHOD)
def test_an_own_micro_batch_above_the_data_shrinks(tmp_path: Path, method: str) -> None:
    user, told = tuned(tmp_path, method=method, samples=OWN - 1)
    check_result(user, told)
    assert told.trials[0]["outcome"] == "INVALID"
    assert told.best["train_micro_batch_size_per_gpu"] == (2 if method == "gridsearch" else OWN - 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", EACH_METHOD)
def test_time_outs_of_large_micro_batches_lead_to_smaller_ones(tmp_path: Path, method: str) -> None:
    failure = Failure("TIMEOUT", {"micro_batch": list(range(12, 200))}, "too slow")
    user, told = tuned(tmp_path, failure, method=method, trials=24)
    check_result(user, told)
    assert 4 < told.best["train_micro_batch_size_per_gpu"] < 12
    timed_out = [row for row in told.trials if row["outcome"] == "TIMEOUT"]
    assert len(timed_out) <= len(told.trials) / 2


# -- the finals


@pytest.mark.parametrize("kind", KINDS)
def test_if_ones_own_fails_in_the_finals_the_gain_is_unconfirmed(tmp_path: Path, kind: str) -> None:
    user, told = tuned(tmp_path, Failure(kind, {"kind": "final", "micro_batch": OWN}, "gone"))
    check_result(user, told)
    assert [row["outcome"] for row in of_kind(told, "final")] == [kind, kind]
    assert "unconfirmed" in told.json["verdict"][0] and told.json["finals"] is None
    assert told.best["train_micro_batch_size_per_gpu"] > OWN


@pytest.mark.parametrize(
    ("kind", "times", "stays"),
    [
        ("ERROR", 1, True),
        ("TIMEOUT", 1, True),
        ("ERROR", 2, False),
        ("OOM", 1, False),
        ("DIVERGED", 1, False),
    ],
)
def test_the_next_takes_the_place_of_a_leader_that_fails_for_good_in_the_finals(
    tmp_path: Path, kind: str, times: int, stays: bool
) -> None:
    """A lost port proves nothing; running out of memory may happen again in the training."""
    _, before = tuned(tmp_path / "before", effects={"z1": 0.9})
    leader = before.best["name"]
    again = [row for row in of_kind(before, "final") if row[MICRO] != OWN]
    first = before.trials.index(again[0])
    failure = Failure(kind, {"trial": [first, first + 1][:times]}, "gone")
    user, told = tuned(tmp_path / "after", failure, effects={"z1": 0.9})
    check_result(user, told)
    assert (told.best["name"] == leader) is stays and told.json["gain"] > 1.1
    lost = [row for row in of_kind(told, "final") if row["outcome"] != "OK"]
    assert len(lost) == times and told.json["finals"]["significant"]


# -- what a metric needs


@pytest.mark.parametrize(
    ("metric", "world"),
    [("FLOPS_per_gpu", {"counts_flops": False}), ("tokens_per_second", {"counts_tokens": False})],
)
def test_a_metric_that_cannot_be_measured_is_named_with_one_that_can(
    tmp_path: Path, metric: str, world: dict[str, Any]
) -> None:
    user = User(tmp_path, World(model=GPT_300M, gpu=A100, **world))
    user.has()
    told = user.tunes("--max-trials", 8, metric=metric)
    said = blamed(told)
    assert "--metric throughput" in said and len(told.trials) == 1
    assert user.tunes("--run-dir", "other", "--max-trials", 8).status == 0


def largest_of_stage_3(user: User) -> int:
    told = user.tunes("--max-trials", 12, "--finals", 0, "--zero-stages", 1, 2, 3)
    rows = [row for row in told.trials if row["stage"] == 3 and row["outcome"] == "OK"]
    return max(int(row["train_micro_batch_size_per_gpu"]) for row in rows)


def test_a_host_without_memory_in_one_strategy_says_nothing_of_others(user: User) -> None:
    other = replace(user, folder=user.folder / "other")
    other.has()
    other.world = replace(user.world, failures=(Failure("HOST_OOM", {"stage": [1, 2]}),))
    assert largest_of_stage_3(other) >= 0.9 * largest_of_stage_3(user)
