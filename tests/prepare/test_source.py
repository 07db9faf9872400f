"""The program of a command, as recorded in a run of the command."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsat.errors import UserInputError
from dsat.prepare import source as sources
from dsat.prepare.target import Target
from testing.helpers import starts_of

MICRO, GAS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CONFIG = {MICRO: 1}
FLAG = "--deepspeed_config"


def run_of(folder: Path, *devices: str) -> Any:
    """Make the record of a run on two devices, chosen by DeepSpeed's launcher."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "CROSS_SIZE": "1"}
    ranks = starts_of(folder, [variables] * 2, CONFIG)
    return SimpleNamespace(ranks=lambda: ranks, env={})


@pytest.mark.parametrize(
    ("command", "positions", "variables"),
    [
        ("deepspeed --include localhost:1,2 train.py", (1, 2), {}),
        ("deepspeed --exclude localhost:0 train.py", (), {}),
        ("bash run.sh", (), {"CUDA_VISIBLE_DEVICES": "1,2"}),
    ],
)
def test_devices_are_chosen_once(
    command: str,
    positions: tuple[int, ...],
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher's option or a variable chooses them; the two together would choose twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    found = sources.read(Target(command=tuple(command.split()))).complete_from_record(
        run_of(tmp_path, "1", "2")
    )
    assert found.program.launch.devices == positions
    assert found.program.env == variables


DEEPSPEED = "lib/python3/site-packages/deepspeed-0.19.8.dist-info"


@pytest.mark.parametrize(
    ("command", "first_line", "installed", "python"),
    [
        ("python train.py", "", DEEPSPEED, "bin/python"),
        ("python -m deepspeed train.py", "", DEEPSPEED, "bin/python"),
        ("PATH={0} python3 train.py", "", DEEPSPEED, "bin/python3"),
        ("A=1 {0}/python train.py", "", DEEPSPEED, "bin/python"),
        ("bin/python3 train.py", "", DEEPSPEED, "bin/python3"),
        ("{0}/python train.py", "", "", None),
        ("PATH=. python3 train.py", "", "", ""),
        ("./train.py", "#!/usr/bin/env python3", DEEPSPEED, "bin/python3"),
        ("./train.py", "#!{0}/python", DEEPSPEED, "bin/python"),
        ("./train.py", "#!/usr/bin/env -S uv run", "", None),
        ("python train.py", "", DEEPSPEED.replace("python3", "python3.9"), None),
        ("./train.py", "", DEEPSPEED, ""),
        ("train.py", "#!{0}/python", DEEPSPEED, ""),  # no shell would run it
        ("python train.py", "", "", ""),  # dsat's own environment is not active
    ],
)
def test_the_python_that_a_shell_would_use(
    command: str,
    first_line: str,
    installed: str,
    python: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("bin", installed):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name in ("bin/python", "bin/python3", "python3"):
        (tmp_path / name).symlink_to(sys.executable)
    (tmp_path / "train.py").write_text(first_line.format(tmp_path / "bin"))
    (tmp_path / "train.py").chmod(0o755)
    (tmp_path / "ds.json").write_text(json.dumps({MICRO: [2, 4]}))
    if "PATH" not in command:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    words = command.format(tmp_path / "bin").split()
    found = sources.read(Target(command=(*words, "--deepspeed_config", "ds.json")))
    assert (sys.executable not in found.command) is (python != "")
    if python is None:
        assert found.unknown == sources.PROGRAM
    else:
        assert found.program.interpreter == (python and str(tmp_path / python))
        assert not found.unknown and not found.can_run_first(), "DeepSpeed would refuse the list"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("srun --export=NONE python train.py", "--export=NONE"),
        ("srun -n 2 -p gpu --export NIL python train.py", "--export=NIL"),
        ("srun --export=SMALL=1 python train.py", "--export=SMALL=1"),
        ("SLURM_EXPORT_ENV=NONE srun python train.py", "SLURM_EXPORT_ENV=NONE"),
        ("SLURM_EXPORT_ENV=NONE srun --export=all,A=1 python train.py", ""),
        ("srun -n 2 python train.py --export=onnx", ""),
    ],
)
def test_srun_must_pass_all_variables_on(
    words: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    target = Target(command=tuple(words.split()))
    if refused:
        with pytest.raises(UserInputError, match=rf"^{refused}: hides .* Write --export=ALL,"):
            sources.read(target)
    else:
        assert sources.read(target).unknown == sources.PROGRAM


@pytest.mark.parametrize("named", ["zero1", "ds.json"])
def test_a_configuration_that_the_script_looks_up(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its argument is a word that trials keep; only a run shows the configuration itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").touch()
    (tmp_path / "src/ds.json").touch()  # a script may look in its own folder
    command = ("src/train.py", "--deepspeed_config", named)
    found = sources.read(Target(command=command))
    assert found.unknown == sources.CONFIG
    [start] = starts_of(tmp_path, [{}], CONFIG)
    start = replace(start, command=(start.command[0], *command))
    found = found.complete_from_record(cast(Any, SimpleNamespace(ranks=lambda: [start], env={})))
    assert found.experiment.base_config.items() >= CONFIG.items()
    assert found.program.use_config("/trial/ds.json", CONFIG, {}, {}).args == command[1:]
    for name in ("zero1.json", "/gone/zero1"):
        with pytest.raises(UserInputError, match=f"{name}, in the script's arguments: there is no"):
            sources.read(Target(command=(*command[:2], name)))


@pytest.mark.parametrize(
    ("words", "file", "changed"),
    [
        (("ds.json",), CONFIG, ("/trial/ds.json",)),
        (("--config", "ds.json", "--lr", "1"), CONFIG, ("--config", "/trial/ds.json", "--lr", "1")),
        (("--config=ds.json",), {MICRO: "auto"}, ("--config=/trial/ds.json",)),
        (("ds.json",), {MICRO: 2}, None),
        (("ds.json",), {**CONFIG, "epochs": 3}, None),  # of the script, which passes a part of it
        (("ds.json",), {}, None),
        (("ds.json",), {"seed": None}, None),
        (("ds.json",), {"optimizer": "auto"}, None),
        ((f"{'a' * 300}.json", "ds.json"), CONFIG, (f"{'a' * 300}.json", "/trial/ds.json")),
        ((FLAG, "ds.json"), CONFIG, (FLAG, "/trial/ds.json")),
        ((FLAG, "ds.json"), {MICRO: "auto", "lr": 1}, (FLAG, "/trial/ds.json")),
        ((FLAG, "ds.json"), {**CONFIG, GAS: None}, (FLAG, "/trial/ds.json")),
        ((FLAG, "ds.json"), {MICRO: 2}, None),  # the script has set the batch that it passes
        ((FLAG, "ds.json"), {"optimizer": {"type": "Adam"}}, None),
    ],
)
def test_an_argument_names_the_configuration_that_the_script_passes(
    words: tuple[str, ...],
    file: dict[str, Any],
    changed: tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its data loader may read the batch size from that file before the engine is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps(file))
    command = ("train.py", *words)
    defaults = {GAS: 1, "train_batch_size": 1, "zero_optimization": {"stage": 0}}
    [start] = starts_of(tmp_path, [{}], {**CONFIG, **defaults})
    start = replace(start, command=(start.command[0], *command))
    found = sources.read(Target(command=command)).complete_from_record(
        cast(Any, SimpleNamespace(ranks=lambda: [start], env={}))
    )
    assert found.program.use_config("/trial/ds.json", CONFIG, {}, {}).args == (changed or words)
    assert (found.program.config_path is None) is (changed is None)
    assert found.experiment.base_config[MICRO] == CONFIG[MICRO]
