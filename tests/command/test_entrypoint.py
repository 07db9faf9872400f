"""Entrypoints as users write them, and the parts of them that affect ranks."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from dsat.command import entrypoint, placement, script_source
from dsat.command.entrypoint import DEEPSPEED, TORCHRUN, Entrypoint, parse
from dsat.command.placement import Launch
from dsat.errors import UserInputError

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
        ("python train.py --lr 0.1", script("--lr", "0.1")),
        ("./train.py --fast", script("--fast", name="./train.py")),
        ("python3 'my script.py' 'two words'", script("two words", name="my script.py")),
        (
            """python3 train.py --end '<s>' --sep "a;b" --cost 'in $US'""",
            script("--end", "<s>", "--sep", "a;b", "--cost", "in $US"),
        ),
        (r"python3 train.py it\'s a\;b", script("it's", "a;b")),
        (["python3", "train.py", 3, "", " x "], script("3", "", " x ")),
        (
            "python3 -O -W ignore src/train.py",
            script(name="src/train.py", python_options=("-O", "-W", "ignore")),
        ),
        ("python3 -u -m train --lr 1", Entrypoint(module="train", args=("--lr", "1"))),
        (f"{sys.executable} train.py", script()),
        (
            "LR=0.1 NAME='two words' python3 train.py A=1",
            script("A=1", env={"LR": "0.1", "NAME": "two words"}),
        ),
        # determined.launch.deepspeed
        (DET + "deepspeed -- python3 train.py", script()),
        (DET + "deepspeed python3 -m package.train", Entrypoint(module="package.train")),
        (DET + "deepspeed --trial=a.b:C", Entrypoint(trial_class="a.b:C")),
        ("A=1 " + DET + "deepspeed --trial a:B", Entrypoint(trial_class="a:B", env={"A": "1"})),
        # determined.launch.torch_distributed
        (DET + "torch_distributed --trial a:B", Entrypoint(trial_class="a:B", launcher=TORCHRUN)),
        (
            DET + "torch_distributed --max_restarts=1 --tee 3 -- python3 train.py -- rest",
            script("--", "rest", launcher=TORCHRUN),
        ),
        # deepspeed
        ("/opt/venv/bin/deepspeed train.py", script(launch=ON_ALL, launcher=DEEPSPEED)),
        (
            "deepspeed train.py --num_gpus 2",
            script("--num_gpus", "2", launch=ON_ALL, launcher=DEEPSPEED),
        ),
        (
            "python3 -m deepspeed.launcher.runner --num_gpus=2 train.py",
            script(launch=PASSES_RANK, launcher=DEEPSPEED, slots=2),
        ),
        (
            "deepspeed --num_accelerators 4 train.py --x",
            script("--x", launch=PASSES_RANK, launcher=DEEPSPEED, slots=4),
        ),
        ("deepspeed --num_gpus -1 train.py", script(launch=ON_ALL, launcher=DEEPSPEED)),
        (
            "deepspeed -q --save_pid --master_addr localhost --master_port=29501 train.py --x",
            script("--x", launch=ON_ALL, launcher=DEEPSPEED),
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
            "deepspeed --num_gpus 2 --bind_cores_to_rank --bind_core_list 0,2-4 train.py",
            script(
                launcher=DEEPSPEED,
                slots=2,
                launch=replace(PASSES_RANK, binds_cores=True, core_list=(0, 2, 3, 4)),
            ),
        ),
        ("python3 -um package.train -m", Entrypoint(module="package.train", args=("-m",))),
        # torchrun
        ("torchrun --nproc_per_node 2 train.py --x", script("--x", launcher=TORCHRUN, slots=2)),
        ("torchrun --nproc_per_node=gpu train.py", script(launch=ALL, launcher=TORCHRUN)),
        (
            "torchrun --nnodes 2 --nproc-per-node 4 train.py",
            script(launch=Launch(nodes=2), launcher=TORCHRUN, slots=8),
        ),
        (
            "torchrun --standalone --log-line-prefix-template '[rank]: ' train.py",
            script(launcher=TORCHRUN),
        ),
        (
            "torchrun -m package.train a",
            Entrypoint(module="package.train", args=("a",), launcher=TORCHRUN),
        ),
        ("torchrun --no-python python3 train.py", script(launcher=TORCHRUN)),
        ("python -m torch.distributed.launch --use-env train.py", script(launcher=TORCHRUN)),
    ],
    ids=str,
)
def test_forms(given: str | list[str], expected: Entrypoint, model_dir: Path) -> None:
    assert parse(given, model_dir) == expected


def test_another_environment_of_the_same_python_is_another_python(
    model_dir: Path, tmp_path: Path
) -> None:
    """The Python of a virtual environment is a link to the Python that made the environment."""
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)
    with pytest.raises(UserInputError, match="dsat runs in "):
        parse(f"{other} train.py", model_dir)


# -- the launchers' own options


@pytest.mark.slow
def test_the_launchers_switches_are_known() -> None:
    from deepspeed.launcher import runner
    from torch.distributed.run import get_args_parser

    with mock.patch.object(argparse.ArgumentParser, "parse_args", autospec=True) as parse_args:
        parse_args.side_effect = StopIteration
        with contextlib.suppress(StopIteration):
            runner.parse_args([])
    [deepspeed] = parse_args.call_args.args
    for parser, launcher in ((deepspeed, DEEPSPEED), (get_args_parser(), TORCHRUN)):
        options = [(name, each) for each in parser._actions for name in each.option_strings]
        assert len(options) > 20
        for name, action in options:
            known = placement.SWITCHES if action.nargs == 0 else placement.VALUED
            spelled = name if launcher == DEEPSPEED else name[:2] + name[2:].replace("_", "-")
            of_help = name in ("-h", "--help") or "completion" in name
            assert (spelled in known[launcher]) is not of_help, name


@pytest.mark.parametrize(
    "line",
    [
        "torchrun -t3 --nproc-per-node 2 train.py",
        "torchrun --nproc-per 2 train.py",
        "deepspeed -Hhosts train.py",
        "deepspeed --num_gpu 2 train.py",
        "deepspeed --new_switch train.py",
    ],
)
def test_an_option_that_is_not_understood_is_left_to_the_first_run(
    line: str, model_dir: Path
) -> None:
    with pytest.raises(entrypoint.UnknownStart, match="does not know this option"):
        parse(line, model_dir)


# -- the DeepSpeed configuration among the arguments


@pytest.mark.parametrize(
    ("line", "path", "replaced"),
    [
        ("", None, ""),
        ("--deepspeed_config ds.json", "ds.json", "--deepspeed_config NEW"),
        ("--deepspeed_config=ds.json", "ds.json", "--deepspeed_config=NEW"),
        ("--deepspeed ds.json --x", "ds.json", "--deepspeed NEW --x"),
        ("--deepspeed=ds.json", "ds.json", "--deepspeed=NEW"),
        ("--deepspeed --lr 1", None, "--deepspeed --lr 1"),
        ("--deepspeed data/", None, "--deepspeed data/"),
        (
            "--deepspeed data/ --deepspeed_config conf",
            "conf",
            "--deepspeed data/ --deepspeed_config NEW",
        ),
        (
            "--deepspeed_config a/ds.json --deepspeed",
            "a/ds.json",
            "--deepspeed_config NEW --deepspeed",
        ),
        ("--deepspeed_config", None, "--deepspeed_config"),
        ("--deepspeed_config=", None, "--deepspeed_config="),
        ("ds.json --deepspeed_config_dir x", None, "ds.json --deepspeed_config_dir x"),
        ("--ds-config=ds.json --ds_lr 1", "ds.json", "--ds-config=NEW --ds_lr 1"),
        ("--deepspeed-json a/ds.hjson", "a/ds.hjson", "--deepspeed-json NEW"),
        ("--ds_config zero2", None, "--ds_config zero2"),
        ("--ds_path rows.json --dsconfig ds.json", "ds.json", "--ds_path rows.json --dsconfig NEW"),
        ("--ds_file rows.json", None, "--ds_file rows.json"),
    ],
)
def test_finds_and_replaces_the_configuration(line: str, path: str | None, replaced: str) -> None:
    program = script(*line.split())
    assert program.config_path == path
    assert program.use_config("NEW", {}, {}, {}) == script(*replaced.split())


# -- the arguments of a trial

HF = "train.py --deepspeed ds.json --output_dir out"
PARSES = "parser = HfArgumentParser(TrainingArguments)"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PARSES, ("--per_device_train_batch_size", "4")),
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
    found = program.use_config("/t/ds_config.json", config, {}, {})
    assert found.args == ("--deepspeed", "/t/ds_config.json", "--output_dir", "out", *expected)


@pytest.mark.parametrize("words", ["args.json", "--train_args_file args.json"])
def test_a_script_that_reads_its_arguments_from_a_file_gets_no_flags(
    tmp_path: Path, words: str
) -> None:
    (tmp_path / "train.py").write_text(f"{PARSES}\nparser.parse_json_file(sys.argv[-1])")
    program = parse(f"python3 train.py {words}", tmp_path)
    found = program.use_config("x.json", {}, {"optim": "adamw_torch"}, {})
    assert found.args == tuple(words.split())


@pytest.mark.parametrize(
    ("flag", "args"),
    [
        ("--batch-size", "--batch-size 8 --epochs 3"),
        ("--micro", "--batch-size 4 --epochs 3 --micro 8"),  # a default of its parser
        ("", "--batch-size 4 --epochs 3"),
    ],
)
def test_the_flag_of_the_micro_batch_follows_it(flag: str, args: str) -> None:
    program = Entrypoint("train.py", args=("--batch-size", "4", "--epochs", "3"))
    config = {"train_micro_batch_size_per_gpu": 8}
    flags = {"train_micro_batch_size_per_gpu": flag} if flag else {}
    assert program.use_config("x.json", config, {}, {}, flags=flags).args == (*args.split(),)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("train --lr 1", "--accum 2 --batch-size 8 train --lr 1"),
        ("--batch-size=4 train", "--accum 2 --batch-size=8 train"),
    ],
)
def test_a_flag_that_subcommands_do_not_know_is_added_in_front(before: str, after: str) -> None:
    program = Entrypoint("train.py", args=tuple(before.split()))
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
    flags = dict(zip(config, ("--batch-size", "--accum"), strict=True))
    found = program.use_config("x.json", config, {}, {}, flags=flags, flag_leads=True)
    assert found.args == tuple(after.split())


# -- the command for people


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)", True),
        ("os.environ['RANK'] = str(rank)\ntorch.multiprocessing.spawn(main)", True),
        ("from accelerate import notebook_launcher\nnotebook_launcher(main)", True),
        ("if 'RANK' in os.environ:\n    main()\nelse:\n    mp.spawn(main)", False),
        ("multiprocessing.Process(target=read).start()", False),
        (
            "if 'RANK' not in os.environ:\n    os.execvp('torchrun', ['torchrun', *sys.argv])",
            True,
        ),
        ("cmd = ['deepspeed', *sys.argv]\nif not os.getenv('RANK'):\n    Popen(cmd)", True),
        ("subprocess.run([sys.executable, '-m', 'torch.distributed.run', 'train.py'])", True),
        ('os.system("accelerate launch train.py")', True),
        ("subprocess.run(['git', 'log'])\ngroups = ['deepspeed', 'fsdp']", False),
        ('"""Start me with torchrun."""\nsubprocess.run(["git", "log"])', False),
        ("loss.backward()\nsubprocess.run(['accelerate', 'launch', '-m', 'lm_eval'])", False),
        ("engine = deepspeed.initialize()\nos.system('torchrun evaluate.py')", False),
        ("Trainer(model)\ncmd = ['torchrun', 'evaluate.py']\nPopen(cmd)", False),
        ("loss.backward()\nLAUNCH = ['deepspeed', 'pretrain.py']\nPopen(['git'])", False),
        ("Trainer(model)\nrun = ['deepspeed', '-H', 'h', 'src/train.py']\nPopen(run)", True),
        ("loss.backward()\nos.execvp('torchrun', [\n'torchrun', __file__])", True),
        ("subprocess.run(['accelerate', 'launch', 'finetune.py'])", True),
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


@pytest.mark.parametrize(
    "line",
    [
        'subprocess.check_output(["git", "log"])\nraise SystemExit("torchrun must start this")',
        'subprocess.run(["nvidia-smi"])\nadd_argument("--how", choices=["none", "torchrun"])',
    ],
)
def test_a_script_that_only_names_a_launcher_starts_no_ranks(line: str) -> None:
    assert not script_source.starts_ranks(f"import subprocess\n{line}\n", "train.py")
