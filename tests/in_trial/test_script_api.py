"""`get_hf_args_with_overwrites`, with which a Trainer script for Determined runs a trial."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import dsat
from dsat.errors import UserInputError

MICRO = "train_micro_batch_size_per_gpu"
GAS = "gradient_accumulation_steps"
BASE = {
    "train_batch_size": "auto",
    MICRO: "auto",
    GAS: "auto",
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
}
BATCH = {"train_batch_size": 12, MICRO: 4, GAS: 3}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the user's own file; temporary files go to a folder next to it."""
    monkeypatch.delenv("DSAT_TRIAL_DIR", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(BASE))
    return path


def hparams(**overrides: Any) -> dict[str, Any]:
    return {"deepspeed_config": "ds_config.json", "overwrite_deepspeed_args": overrides}


@pytest.mark.parametrize("equals", [False, True])
def test_the_file_is_another_one_and_the_flags_agree(base: Path, equals: bool) -> None:
    before = base.read_bytes()
    config = [f"--deepspeed={base}"] if equals else ["--deepspeed", str(base)]
    args = [*config, "--per_device_train_batch_size", "8", "--x"]
    assert dsat.get_hf_args_with_overwrites(args, hparams()) == args
    given = list(args)
    overrides = {**BATCH, "zero_optimization": {"stage": 2}}

    found = dsat.get_hf_args_with_overwrites(args, hparams(**overrides))

    assert args == given
    assert base.read_bytes() == before
    name = found[0].partition("=")[2] if equals else found[1]
    assert found[len(config) :] == [
        *("--per_device_train_batch_size", "4", "--x", "--gradient_accumulation_steps", "3")
    ]
    assert json.loads(Path(name).read_text()) == {
        **BATCH,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    assert Path(name).parent == base.parent / "tmp"
    assert [path.name for path in (base.parent / "tmp").iterdir()] == [Path(name).name]


def test_no_configuration_starts_deepspeeds_own_autotuning(base: Path) -> None:
    """DeepSpeed's autotuning would end a training after a few steps."""
    own = {**BASE, "autotuning": {"enabled": True}}
    for given in (own, base.name):
        base.write_text(json.dumps(own))
        values = {"deepspeed_config": given, "overwrite_deepspeed_args": BATCH}
        assert dsat.get_ds_config_from_hparams(values, base.parent) == {**BASE, **BATCH}
    found = dsat.get_hf_args_with_overwrites(["--deepspeed", str(base)], hparams(**BATCH))
    assert json.loads(Path(found[1]).read_text()) == {**BASE, **BATCH}


def test_auto_never_reaches_the_command_line(base: Path) -> None:
    args = ["--deepspeed", str(base), "--per_device_train_batch_size", "8"]
    found = dsat.get_hf_args_with_overwrites(args, hparams(zero_optimization={"stage": 3}))
    assert found[2:] == ["--per_device_train_batch_size", "8"]
    assert json.loads(Path(found[1]).read_text())[MICRO] == "auto"


def test_a_file_that_is_the_trials_already_is_used_as_it_is(base: Path) -> None:
    base.write_text(json.dumps({**BASE, **BATCH}))
    args = ["--deepspeed", str(base), "--per_device_train_batch_size", "4"]
    found = dsat.get_hf_args_with_overwrites(args, hparams(**BATCH))
    assert found == [*args, "--gradient_accumulation_steps", "3"]
    assert list((base.parent / "tmp").iterdir()) == []


def test_trials_have_files_of_their_own(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSAT_TRIAL_DIR", str(tmp_path))
    args = ["--deepspeed", str(base)]
    paths = {
        dsat.get_hf_args_with_overwrites(args, hparams(zero_optimization={"stage": stage}))[1]
        for stage in (0, 1, 2, 3, 3)
    }
    assert len(paths) == 4  # stage 1 is the user's own
    assert all(Path(path).parent == tmp_path for path in paths)


def test_two_ranks_at_once_agree(base: Path) -> None:
    code = (
        "import json, sys, dsat\n"
        "args, hparams = map(json.loads, sys.argv[1:])\n"
        "for _ in range(20):\n"
        "    found = dsat.get_hf_args_with_overwrites(args, hparams)\n"
        "    json.load(open(found[1]))\n"
        "print(found)\n"
    )
    words = [json.dumps(["--deepspeed", str(base)]), json.dumps(hparams(**BATCH))]
    before = base.read_bytes()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE,
            env={"TMPDIR": str(base.parent / "tmp")},
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told[0] == told[1]
    assert base.read_bytes() == before
    assert len(list((base.parent / "tmp").iterdir())) == 1


@pytest.mark.parametrize("args", [["--x"], ["--deepspeed"], ["--deepspeed", "--x"]])
def test_arguments_without_a_configuration(args: list[str]) -> None:
    with pytest.raises(UserInputError, match="Add --deepspeed with the path"):
        dsat.get_hf_args_with_overwrites(args, hparams(**BATCH))


@pytest.mark.parametrize("text", [None, "{"])
def test_a_configuration_that_cannot_be_read(base: Path, text: str | None) -> None:
    base.unlink()
    if text is not None:
        base.write_text(text)
    with pytest.raises(UserInputError, match=r"ds_config\.json: "):
        dsat.get_hf_args_with_overwrites(["--deepspeed", str(base)], hparams(**BATCH))


@pytest.mark.parametrize(("gas", "counted"), [(3, 3), ("auto", 1), (None, 1)])
def test_the_batch_sizes_are_the_ancestors(gas: int | str | None, counted: int) -> None:
    config: dict[str, Any] = {MICRO: 4}
    config |= {} if gas is None else {GAS: gas}
    # As determined.pytorch.dsat of determined 0.37.0 has it.
    expected = {"train_batch_size": 4 * counted * 2, MICRO: 4, GAS: counted}
    assert dsat.get_batch_config_from_mbs_gas_and_slots(config, slots=2) == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"deepspeed_config": 3}, "deepspeed_config"),
        ({"deepspeed_config": None}, "deepspeed_config"),
        ({"deepspeed_config": {}, "overwrite_deepspeed_args": 3}, "overwrite_deepspeed_args"),
        ({"deepspeed_config": {}}, MICRO),
        ({"deepspeed_config": {MICRO: "auto"}}, MICRO),
        ({"deepspeed_config": {MICRO: 4, GAS: 0}}, GAS),
        ({"deepspeed_config": {MICRO: 4}}, "slots"),
    ],
)
def test_values_of_a_wrong_type_are_named(values: dict[str, Any], named: str) -> None:
    slots = 0 if named == "slots" else 2
    with pytest.raises(UserInputError, match=f"^{named}: must be"):
        dsat.get_batch_config_from_mbs_gas_and_slots(dsat.get_ds_config_from_hparams(values), slots)
    if named == "overwrite_deepspeed_args":
        with pytest.raises(UserInputError, match=named):
            dsat.get_hf_args_with_overwrites([], values)
