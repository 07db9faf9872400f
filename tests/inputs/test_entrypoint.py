"""Entrypoints as users write them, and what of them matters to the ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from dsat.errors import UserInputError
from dsat.inputs import entrypoint
from dsat.inputs.entrypoint import DEEPSPEED, TORCHRUN, Entrypoint, parse
from dsat.inputs.placement import Launch

PASSES_RANK = Launch(passes_local_rank=True)
ALL = Launch(takes_all=True)
ON_ALL = replace(PASSES_RANK, takes_all=True)  # devices
DET = "python3 -m determined.launch."


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for name in ("train.py", "my script.py", "src/train.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    return folder


def script(*args: str, name: str = "train.py", **more: object) -> Entrypoint:
    return Entrypoint(script=name, args=args, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # plain Python
        ("python3 train.py", script()),
        ("python train.py --lr 0.1", script("--lr", "0.1")),
        ("python3 ./train.py", script(name="./train.py")),
        ("./train.py --fast", script("--fast", name="./train.py")),
        ("python3 'my script.py' 'two words'", script("two words", name="my script.py")),
        (["python3", "my script.py", "two words"], script("two words", name="my script.py")),
        (["python3", "train.py", 3, 0.5], script("3", "0.5")),
        (["python3", "train.py", "--tag", "", " x "], script("--tag", "", " x ")),
        ("python3 train.py --tag ''", script("--tag", "")),
        ("python3 -O -u train.py -x", script("-x", python_options=("-O",))),
        (
            "python3 -W ignore -X faulthandler train.py",
            script(python_options=("-W", "ignore", "-X", "faulthandler")),
        ),
        ("python3 -m package.train --lr 1", Entrypoint(module="package.train", args=("--lr", "1"))),
        ("python3 -u -m train", Entrypoint(module="train")),
        (f"{sys.executable} train.py", script()),
        # assignments in front
        (
            "LR=0.1 NAME='two words' python3 train.py A=1",
            script("A=1", env={"LR": "0.1", "NAME": "two words"}),
        ),
        (["LR=0.1", "python3", "train.py"], script(env={"LR": "0.1"})),
        # determined.launch.deepspeed
        (DET + "deepspeed python3 train.py", script()),
        (DET + "deepspeed -- python3 train.py", script()),
        (DET + "deepspeed python3 -m package.train", Entrypoint(module="package.train")),
        (
            DET + "deepspeed --trial model_def:GANTrial",
            Entrypoint(trial_class="model_def:GANTrial"),
        ),
        (DET + "deepspeed --trial=a.b:C", Entrypoint(trial_class="a.b:C")),
        (
            ["python3", "-m", "determined.launch.deepspeed", "--trial", "a:B"],
            Entrypoint(trial_class="a:B"),
        ),
        ("A=1 " + DET + "deepspeed --trial a:B", Entrypoint(trial_class="a:B", env={"A": "1"})),
        # determined.launch.torch_distributed
        (DET + "torch_distributed python3 train.py", script(launcher=TORCHRUN)),
        (DET + "torch_distributed --trial a:B", Entrypoint(trial_class="a:B", launcher=TORCHRUN)),
        (DET + "torch_distributed -- python3 train.py --x", script("--x", launcher=TORCHRUN)),
        (
            DET + "torch_distributed --max_restarts=1 --tee 3 -- python3 train.py -- rest",
            script("--", "rest", launcher=TORCHRUN),
        ),
        # deepspeed
        ("deepspeed train.py", script(launch=ON_ALL, launcher=DEEPSPEED)),
        (
            "deepspeed train.py --num_gpus 2",
            script("--num_gpus", "2", launch=ON_ALL, launcher=DEEPSPEED),
        ),
        (
            "deepspeed --num_gpus 2 train.py --x",
            script("--x", launch=PASSES_RANK, launcher=DEEPSPEED, slots=2),
        ),
        (
            "deepspeed --num_gpus=2 train.py",
            script(launch=PASSES_RANK, launcher=DEEPSPEED, slots=2),
        ),
        (
            "deepspeed --num_accelerators 4 train.py",
            script(launch=PASSES_RANK, launcher=DEEPSPEED, slots=4),
        ),
        ("deepspeed --num_gpus -1 train.py", script(launch=ON_ALL, launcher=DEEPSPEED)),
        (
            "deepspeed --no_local_rank train.py",
            script(launch=ALL, launcher=DEEPSPEED),
        ),
        (
            "deepspeed -q --save_pid train.py --x",
            script("--x", launch=ON_ALL, launcher=DEEPSPEED),
        ),
        (
            "deepspeed --master_addr localhost --master_port=29501 train.py",
            script(launch=ON_ALL, launcher=DEEPSPEED),
        ),
        (
            "deepspeed --module package.train -x",
            Entrypoint(module="package.train", args=("-x",), launch=ON_ALL, launcher=DEEPSPEED),
        ),
        (
            "deepspeed --no_python --no_local_rank python3 train.py",
            script(launch=ALL, launcher=DEEPSPEED),
        ),
        (
            "python3 -m deepspeed.launcher.runner --num_gpus 2 train.py",
            script(launch=PASSES_RANK, launcher=DEEPSPEED, slots=2),
        ),
        ("/opt/venv/bin/deepspeed train.py", script(launch=ON_ALL, launcher=DEEPSPEED)),
        (
            "deepspeed --num_gpus 2 --bind_cores_to_rank --bind_core_list 0,2-4 train.py",
            script(
                launcher=DEEPSPEED,
                slots=2,
                launch=replace(PASSES_RANK, binds_cores=True, core_list=(0, 2, 3, 4)),
            ),
        ),
        # torchrun
        ("torchrun train.py", script(launcher=TORCHRUN)),
        ("torchrun --nproc_per_node 2 train.py --x", script("--x", launcher=TORCHRUN, slots=2)),
        ("torchrun --nproc-per-node=2 train.py", script(launcher=TORCHRUN, slots=2)),
        (
            "torchrun --nproc_per_node=gpu train.py",
            script(launch=ALL, launcher=TORCHRUN),
        ),
        (
            "torchrun --nnodes 2 --nproc-per-node 4 train.py",
            script(launch=Launch(nodes=2), launcher=TORCHRUN, slots=8),
        ),
        (
            "torchrun --standalone --nnodes=1 --nproc-per-node 2 train.py",
            script(launcher=TORCHRUN, slots=2),
        ),
        (
            "torchrun --log-line-prefix-template '[${rank}]: ' train.py".replace("${rank}", "rank"),
            script(launcher=TORCHRUN),
        ),
        ("torchrun --virtual-local-rank train.py", script(launcher=TORCHRUN)),
        (
            "torchrun -m package.train a",
            Entrypoint(module="package.train", args=("a",), launcher=TORCHRUN),
        ),
        ("torchrun --no-python python3 train.py", script(launcher=TORCHRUN)),
        (
            "python3 -m torch.distributed.run --nproc_per_node=2 train.py",
            script(launcher=TORCHRUN, slots=2),
        ),
        ("python -m torch.distributed.launch --use-env train.py", script(launcher=TORCHRUN)),
    ],
)
def test_forms(given: str | list[str], expected: Entrypoint, model_dir: Path) -> None:
    assert parse(given, model_dir) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "is empty"),
        ([], "is empty"),
        ([" ", "train.py"], "is empty"),
        ("LR=0.1", "is empty"),
        ("cd src && python3 train.py", "needs a shell"),
        ("python3 train.py | tee log", "needs a shell"),
        ("python3 train.py > log 2>&1", "needs a shell"),
        ("python3 train.py --dir $HOME", "needs a shell"),
        ("python3 train.py $(nproc)", "needs a shell"),
        ("python3 train.py `nproc`", "needs a shell"),
        ("python3 'train.py", "No closing quotation"),
        ("bash run.sh", "'bash' is not a launcher that dsat knows"),
        ("accelerate launch train.py", "'accelerate' is not a launcher"),
        (DET + "deepspeed bash run.sh", "'bash' is not a launcher"),
        ("python3 missing.py", "there is no file 'missing.py' in "),
        (DET + "deepspeed python3 missing.py", "there is no file 'missing.py'"),
        ("python3", "names no script"),
        ("python3 -c 'print(1)'", "names no script"),
        ("python3 -m", "names no script"),
        (DET + "deepspeed", "is given no script"),
        (DET + "deepspeed --trial a:B more", "--trial takes exactly one module:Class"),
        (DET + "torch_distributed --", "is given no script"),
        ("deepspeed --num_gpus 2", "deepspeed is given no script"),
        ("torchrun --nproc_per_node 2", "torchrun is given no script"),
        ("deepspeed --autotuning tune train.py", "--autotuning is DeepSpeed's own tuner"),
        ("/opt/other/bin/python3 train.py", "/opt/other/bin/python3 is not the Python that runs"),
        ("python3.6 train.py", "python3.6 is not the Python that runs dsat"),
        *(
            (f"deepspeed --bind_core_list {bad} train.py", "ascending numbers and ranges")
            for bad in ("4,2", "3-1", "a", "1,", "0-1,1", "0-99999999999")
        ),
        (["python3", ["train.py"]], "['train.py'] is not an argument"),
        (["python3", {"train.py": 1}], "is not an argument"),
    ],
)
def test_errors_name_the_problem_in_one_line(
    given: str | list[str], problem: str, model_dir: Path
) -> None:
    with pytest.raises(UserInputError) as caught:
        parse(given, model_dir)
    text = str(caught.value)
    assert text.startswith("entrypoint: ")
    assert problem in text
    assert "\n" not in text


def test_another_environment_of_the_same_python_is_another_python(
    model_dir: Path, tmp_path: Path
) -> None:
    """The python of a virtual environment is a link to the one that it was made with."""
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    with pytest.raises(UserInputError, match="is not the Python that runs dsat"):
        parse(f"{other} train.py", model_dir)


# -- the launchers' own options


@pytest.fixture
def deepspeed_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    from deepspeed.launcher import runner

    class Found(Exception):
        pass

    def parse_args(self: argparse.ArgumentParser, args: object = None) -> None:
        raise Found(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
        try:
            runner.parse_args([])
        except Found as found:
            yield _switches(found.args[0])


def _switches(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """Every option of a launcher: whether it takes no value."""
    return {
        name: action.nargs == 0
        for action in parser._actions
        for name in action.option_strings
        if name not in ("-h", "--help")
    }


@pytest.mark.slow
def test_deepspeeds_switches_are_known(deepspeed_switches: dict[str, bool]) -> None:
    assert len(deepspeed_switches) > 20
    for name, is_switch in deepspeed_switches.items():
        assert (name in entrypoint._DEEPSPEED_SWITCHES) == is_switch, name


@pytest.mark.slow
def test_torchruns_switches_are_known() -> None:
    from torch.distributed.run import get_args_parser

    switches = _switches(get_args_parser())
    assert len(switches) > 20
    for name, is_switch in switches.items():
        assert (name in entrypoint._TORCHRUN_SWITCHES) == is_switch, name


# -- the DeepSpeed configuration among the arguments


@pytest.mark.parametrize(
    ("args", "path", "replaced"),
    [
        ((), None, ()),
        (("--deepspeed_config", "ds.json"), "ds.json", ("--deepspeed_config", "NEW")),
        (("--deepspeed_config=ds.json",), "ds.json", ("--deepspeed_config=NEW",)),
        (("--deepspeed", "ds.json", "--x"), "ds.json", ("--deepspeed", "NEW", "--x")),
        (("--deepspeed=ds.json",), "ds.json", ("--deepspeed=NEW",)),
        (("--deepspeed",), None, ("--deepspeed",)),
        (("--deepspeed", "--lr", "1"), None, ("--deepspeed", "--lr", "1")),
        (("--deepspeed", "data/"), None, ("--deepspeed", "data/")),
        (
            ("--deepspeed", "--deepspeed_config", "a/ds.json"),
            "a/ds.json",
            ("--deepspeed", "--deepspeed_config", "NEW"),
        ),
        (
            ("--deepspeed_config", "a/ds.json", "--deepspeed"),
            "a/ds.json",
            ("--deepspeed_config", "NEW", "--deepspeed"),
        ),
        (
            ("--deepspeed", "data/", "--deepspeed_config", "conf"),
            "conf",
            ("--deepspeed", "data/", "--deepspeed_config", "NEW"),
        ),
        (("--deepspeed_config",), None, ("--deepspeed_config",)),
        (("--deepspeed_config=",), None, ("--deepspeed_config=",)),
        (("--config", "ds.json"), None, ("--config", "ds.json")),
        (
            ("ds.json", "--deepspeed_config_dir", "x"),
            None,
            ("ds.json", "--deepspeed_config_dir", "x"),
        ),
    ],
)
def test_finds_and_replaces_the_configuration(
    args: tuple[str, ...], path: str | None, replaced: tuple[str, ...]
) -> None:
    program = script(*args)
    assert program.config_path == path
    assert program.for_config("NEW", {}, {}, {}) == script(*replaced)
    assert program.args == args


# -- the arguments of a trial

HF = "train.py --deepspeed ds.json --output_dir out"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("parser = HfArgumentParser(TrainingArguments)", ("--per_device_train_batch_size", "4")),
        ("TrlParser((\n  ModelConfig,\n  DPOConfig,\n))", ("--per_device_train_batch_size", "4")),
        ("HfArgumentParser((Script, ModelConfig))\nDPOConfig(output_dir=script.output_dir)", ()),
        ("parser = argparse.ArgumentParser()  # refuses what it does not know", ()),
    ],
)
def test_flags_are_added_where_the_script_surely_knows_them(
    tmp_path: Path, source: str, expected: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(source)
    program = parse(f"python3 {HF}", tmp_path)
    config = {"train_micro_batch_size_per_gpu": 4}
    found = program.for_config("/t/ds_config.json", config, {}, {})
    assert found.args == ("--deepspeed", "/t/ds_config.json", "--output_dir", "out", *expected)


@pytest.mark.parametrize("words", ["args.json", "--train_args_file args.json"])
def test_a_script_that_reads_its_arguments_from_a_file_gets_no_flags(
    tmp_path: Path, words: str
) -> None:
    source = "parser = HfArgumentParser(TrainingArguments)\nparser.parse_json_file(sys.argv[-1])"
    (tmp_path / "train.py").write_text(source)
    program = parse(f"python3 train.py {words}", tmp_path)
    found = program.for_config("x.json", {}, {"optim": "adamw_torch"}, {})
    assert found.args == tuple(words.split())


def test_the_users_own_flags_follow_the_trial(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    program = parse("python3 train.py --bs 1 --ckpt", tmp_path)
    mappings = {"train_micro_batch_size_per_gpu": "--bs", "gradient_checkpointing": "--ckpt"}
    config = {"train_micro_batch_size_per_gpu": 4}
    found = program.for_config("x.json", config, {"gradient_checkpointing": False}, mappings)
    assert found.args == ("--bs", "4")
    assert program.for_config("x.json", config, {}, {}).args == ("--bs", "1", "--ckpt")


# -- the command for people


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("deepspeed --num_gpus 2 train.py --x", ["train.py", "--x"]),
        ("python3 -O train.py", ["-O", "train.py"]),
        ("torchrun -m package.train", ["-m", "package.train"]),
        (DET + "deepspeed --trial a:B", ["-m", "determined.exec.harness", "a:B"]),
    ],
)
def test_the_plain_command(given: str, command: list[str], model_dir: Path) -> None:
    assert parse(given, model_dir).command() == [sys.executable, *command]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)", True),
        ("from torch.multiprocessing import spawn\nif True:\n    spawn(main)", True),
        ("os.environ['RANK'] = str(rank)\ntorch.multiprocessing.spawn(main)", True),
        ("from accelerate import notebook_launcher\nnotebook_launcher(main)", True),
        ("if 'RANK' in os.environ:\n    main()\nelse:\n    mp.spawn(main)", False),
        ("rank = int(os.environ['LOCAL_RANK'])\nmp.spawn(main)", False),
        ("multiprocessing.Process(target=read).start()", False),
    ],
)
def test_a_script_that_starts_its_ranks_itself_is_known(
    source: str, expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(source)
    command = ["COLOUR=blue", "python3", "-u", "train.py", "--steps", "2"]
    assert entrypoint.starts_its_ranks(command, tmp_path) is expected
    assert entrypoint.starts_its_ranks(["train.py"], tmp_path) is expected
    assert not entrypoint.starts_its_ranks(["torchrun", "train.py"], tmp_path)
    assert not entrypoint.starts_its_ranks(["python3", "-m", "train"], tmp_path)
