"""Training scripts, the commands that start them, and the result that dsat must reach.

`SCRIPTS` are tuned by `testing/tuned_scripts.py`, `tests/end_to_end` and `make real-scripts`.
`STYLES` are simulated and measured by `testing/styles.py` and `python -m benchmarks.styles`.
"""

from __future__ import annotations

import copy
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsat.command import ds_config

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"
_REAL = ROOT / "benchmarks" / "programs" / "real"

# Suites that tune a script: `make test`, `make nightly`, and two further targets of the Makefile.
SLOW, NIGHTLY, FRAMEWORKS, REAL = "slow", "nightly", "frameworks", "real-scripts"

SRUN = "srun"  # in a Slurm job on this machine, if Slurm is installed
_PLUGIN, _FILE = "accelerate's plugin", "accelerate with a file"
_ACCELERATE = "accelerate launch --config_file {} --num_processes {{ranks}} {{script}}"
_TORCHRUN = "torchrun --standalone --nproc_per_node {ranks} {script}"
LAUNCHERS: Mapping[str, str] = {
    "python": "python {script}",  # or the script's own command, if it has one
    "deepspeed": "deepspeed --num_gpus {ranks} {script}",
    "torchrun": _TORCHRUN,
    _PLUGIN: _ACCELERATE.format("plugin.yaml"),
    _FILE: _ACCELERATE.format("file.yaml"),
    "bash run.sh": _TORCHRUN,  # as the only line of that file
    SRUN: "srun --overcommit --ntasks {ranks} bash rank.sh {script}",
}
_WITHOUT_ACCELERATE = ("python", "deepspeed", "torchrun", "bash run.sh", SRUN)


@dataclass(frozen=True)
class Failure:
    """How a command must fail.

    Attributes:
        status: the exit status of the command.
        words: parts of its output: kind and place of the error, and the script's own message.
    """

    status: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """A training script and the ways in which users start it.

    Attributes:
        name: a title for people.
        words: the script and its flags.
        folder: a folder that is copied for each search; None if `files` is all that is needed.
        files: further files of that folder: text by name.
        config: flags that name DeepSpeed's configuration; `accelerate launch` replaces them.
        launchers: keys of `LAUNCHERS`.
        most_ranks: the most ranks with which it trains on CPU cores; `python` starts one.
        suites: the suites that tune it.
        options: options of dsat, in addition to those of all scripts.
        command: a command of the framework, used in place of `python`.
        needs: a package that is missing in some environments.
        packages: a key of `PACKAGES`, the installation that holds the script.
        make: a script of the folder, with arguments, that makes models and data.
        prepares: patterns of files that the script writes before its training begins.
        own_file: a file that the command names; the search writes changed copies of it.
        batch_key: the key of the micro batch in `own_file`.
        variables: variables that the command needs on a machine without a GPU.
        says: a pattern that the search's output must match.
        method: the search method.
        fails: the expected failure; None if tuning succeeds.
    """

    name: str
    words: str
    folder: Path | None = PROGRAMS / "frameworks"
    files: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    launchers: tuple[str, ...] = tuple(LAUNCHERS)
    most_ranks: int = 2
    suites: tuple[str, ...] = (FRAMEWORKS, NIGHTLY)
    options: str = ""
    command: str = ""
    needs: str = ""
    packages: str = ""
    make: str = ""
    prepares: tuple[str, ...] = ()
    own_file: str = ""
    batch_key: str = "per_device_train_batch_size"
    variables: Mapping[str, str] = field(default_factory=dict)
    says: str = ""
    method: str = "model"
    fails: Failure | None = None

    def can_start(self, launcher: str, ranks: int) -> bool:
        """Return whether a launcher can start this script with `ranks` ranks on CPU cores."""
        is_alone = launcher == "python" and not self.command
        return launcher in self.launchers and ranks <= (1 if is_alone else self.most_ranks)

    def typed(self, launcher: str, ranks: int, packages: Path = Path()) -> list[str]:
        """Return the command of a launcher, split into words."""
        if launcher == "python" and self.command:
            return shlex.split(self.command.format(ranks=ranks))
        script = f"{packages / self.words if self.packages else self.words}"
        if "accelerate" not in launcher:
            script = f"{script} {self.config}"
        return shlex.split(LAUNCHERS[launcher].format(ranks=ranks, script=script))


_DS_JSON, _AUTO_JSON = "--deepspeed --deepspeed_config ds.json", "--deepspeed auto.json"
_TRAINER = "--output_dir out --use_cpu --report_to none --save_strategy no --max_steps 1000"
_TRAINER += " --per_device_train_batch_size 2"
_SHORT = "--num_generations 2 --max_completion_length 8"
_TRAINED: dict[str, Any] = {"config": _AUTO_JSON, "prepares": ("out",)}
# Axolotl and ms-swift write their configuration into `out` before they make the engine.
_OF_FILE: dict[str, Any] = {"make": "make.py", "prepares": ("out", "out/*", "prepared*")}
_SMALL = "--max-micro-batch 32 --slots 1"
_AXOLOTL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}
_BATCH = "per_device_train_batch_size"

_FRAMEWORKS = (
    Script("plain loop", "plain.py", config=_DS_JSON, launchers=_WITHOUT_ACCELERATE),
    Script("torch.compile", "plain.py --compile", config=_DS_JSON, launchers=_WITHOUT_ACCELERATE),
    Script("accelerate loop", f"loop.py --{_BATCH} 2", launchers=(_PLUGIN, _FILE)),
    Script("HF Trainer", f"trainer.py {_TRAINER}", suites=(FRAMEWORKS, SLOW), **_TRAINED),
    Script("PEFT LoRA", f"trainer.py {_TRAINER} --lora", needs="peft", **_TRAINED),
    Script("TRL SFT", f"sft.py {_TRAINER}", needs="trl", **_TRAINED),
    Script("TRL DPO", f"dpo.py {_TRAINER}", needs="trl", **_TRAINED),
    Script(
        "TRL GRPO",
        f"grpo.py {_TRAINER} {_SHORT}",
        needs="trl",
        options="--divisible-by 2",
        **_TRAINED,
    ),
    Script(
        "Lightning",
        "on_lightning.py --batch-size 2",
        needs="lightning",
        launchers=_WITHOUT_ACCELERATE,
        most_ranks=1,  # its ranks select devices by number, but torch has a single CPU device
        options="--arg-mapping train_micro_batch_size_per_gpu=--batch-size",
    ),
    Script(
        "TRL with its own file",
        "trl/scripts/sft.py --config trl.yaml",
        command="torchrun --nproc-per-node {ranks} -m trl.scripts.sft --config trl.yaml",
        launchers=("python",),
        packages="TRL",
        own_file="trl.yaml",
        **_OF_FILE,
    ),
    # Two launchers cannot start it: accelerate's plugin rejects a file that names another DeepSpeed
    # configuration, and `deepspeed` inserts an argument before the file, which must come first.
    Script(
        "LLaMA-Factory",
        "llamafactory/launcher.py llamafactory.yaml",
        command="FORCE_TORCHRUN=1 NPROC_PER_NODE={ranks} llamafactory-cli train llamafactory.yaml",
        launchers=("python", "torchrun", _FILE, "bash run.sh", SRUN),
        packages="LLaMA-Factory",
        own_file="llamafactory.yaml",
        **_OF_FILE,
    ),
    Script(
        "Axolotl",
        "axolotl/cli/train.py axolotl.yaml",
        command="axolotl train axolotl.yaml --launcher torchrun -- --nproc_per_node={ranks}",
        launchers=tuple(name for name in LAUNCHERS if name != _PLUGIN),
        most_ranks=1,  # with two ranks, it queries CUDA devices
        packages="Axolotl",
        own_file="axolotl.yaml",
        batch_key="micro_batch_size",
        variables=_AXOLOTL,
        **_OF_FILE,
    ),
    Script(
        "ms-swift",
        "swift/cli/sft.py swift.yaml",
        command="NPROC_PER_NODE={ranks} swift sft swift.yaml",
        launchers=("python",),
        packages="ms-swift",
        own_file="swift.yaml",
        **_OF_FILE,
    ),
)


def _real(name: str, command: str, *prepares: str, **more: Any) -> Script:
    more = {"folder": _REAL, "options": _SMALL, **more}
    more |= {"command": command, "prepares": prepares, "launchers": ("python",)}
    return Script(name, "", suites=(REAL, NIGHTLY), **more)


_REAL_TRAINER = "--output_dir out --report_to none --deepspeed auto.json"
_CLM = f"deepspeed trainer.py {_REAL_TRAINER} --{_BATCH} 2"
_REAL_SCRIPTS = (
    # Its configuration fixes the global batch at 16, so micro batches stay small.
    _real("cifar", "deepspeed cifar.py --deepspeed", options="--max-micro-batch 8 --slots 1"),
    _real("glue", f"python3 glue.py {_REAL_TRAINER} --{_BATCH} 8", "out"),
    _real("clm", _CLM, "out", folder=PROGRAMS / "frameworks"),
    _real(
        "gpt",
        "torchrun --standalone --nproc_per_node 1 gpt.py --batch_size 12",
        "data",
        "data/train.bin",
    ),
    _real(
        "hello",
        "bash hello.sh",
        *("experiments", "experiments/bert.????.??.??.??.??.??", "experiments/*/hparams.json"),
    ),
)

_FILES = (  # scripts with separate tests
    Script(
        "checkpoints and trackers",
        "train.py",
        PROGRAMS / "saves",
        config="--deepspeed --deepspeed_config ds_config.json",
        launchers=("python",),
        suites=(),
        make="make.py",
    ),
    Script(
        "files of its own",
        "train.py",
        PROGRAMS / "rotates",
        launchers=("python",),
        suites=(),
        make="train.py --make",
    ),
)

_IMPORTS = "import torch, deepspeed\nfrom torch.nn import Linear\n"
_CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
_BEGINS = f"deepspeed.initialize(model=net, model_parameters=net.parameters(), config={_CONFIG})\n"
_PIPELINE = "from deepspeed.pipe import PipelineModule\ndeepspeed.init_distributed()\n"
_PIPELINE += f"net = PipelineModule([Linear(8, 8)], num_stages=1)\n{_BEGINS}"


def _fails(
    name: str, script: str, *words: str, status: int = 1, suite: str = REAL, **more: Any
) -> Script:
    files = {"train.py": script, "run.sh": "python3 train.py\n", **more.pop("files", {})}
    more = {"command": "python3 train.py", "launchers": ("python",), "files": files, **more}
    return Script(name, "", None, suites=(suite, SLOW), fails=Failure(status, words), **more)


_NO_FILE, _BY_SHELL = "open('no/such/file')\n", "bash run.sh"
_FAILING = (
    _fails(
        "an unknown option",
        "import argparse\nargparse.ArgumentParser().parse_args(['--typo'])\n",
        *("error: unrecognized arguments: --typo", "dsat: error: "),
    ),
    _fails("a missing file", _NO_FILE, "FileNotFoundError: ", "no/such/file", "train.py"),
    _fails("a missing module", "import not_there\n", "ModuleNotFoundError: ", "not_there"),
    _fails("a missing file, in a shell script", _NO_FILE, "no/such/file", command=_BY_SHELL),
    _fails("a missing module, in a shell script", "import not_there\n", command=_BY_SHELL),
    _fails(
        "a model in a pipeline",
        _IMPORTS + _PIPELINE,
        *("error: command: rank 0: ", "pipeline parallel models cannot be tuned"),
        status=2,
        suite=SLOW,
    ),
    # Without a launcher, DeepSpeed looks for MPI; so would the command that dsat prints.
    _fails(
        "a command without its launcher",
        f"{_IMPORTS}net = Linear(8, 8)\n{_BEGINS}",
        *("ImportError: there is no MPI", "your script's own error"),
        suite=SLOW,
        command="bash -c 'echo $RANK$MASTER_ADDR > given; python train.py'",
        files={"mpi4py.py": "raise ImportError('there is no MPI')\n"},
        prepares=("given",),
    ),
)

SCRIPTS: Mapping[str, Script] = {
    s.name: s for s in (*_FRAMEWORKS, *_REAL_SCRIPTS, *_FILES, *_FAILING)
}


def of_suite(suite: str, *, failing: bool = False) -> list[Script]:
    """Return the scripts of a suite: those that it tunes, or with `failing` those that must
    fail."""
    scripts = (s for s in SCRIPTS.values() if suite in s.suites)
    return [s for s in scripts if (s.fails is not None) is failing]


_BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}
_FP16: Mapping[str, Any] = {"fp16": {"enabled": True}}
_FP32: Mapping[str, Any] = {}
_MASTER: Mapping[str, Any] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}
_AUTOCAST: Mapping[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
_MUON: Mapping[str, Any] = {**_BF16, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
_MUON_STAGE_3: Mapping[str, Any] = {**_MUON, "zero_optimization": {"reduce_scatter": False}}
_OWN_OPTIMIZER: Mapping[str, Any] = {**_BF16, "zero_allow_untested_optimizer": True}


@dataclass(frozen=True)
class Style:
    """A way to write a training script; its memory is simulated and measured on one rank.

    Attributes:
        name: a title for people.
        script: the script and its flags, with placeholders `{config}` and `{size}` (micro batch).
        variant: value of `--variant`, for a script without the placeholder `{config}`.
        folder: the folder of the script.
        stage: the ZeRO stage.
        settings: DeepSpeed settings in addition to batch, stage and optimizer.
        needs: a package that is missing in some environments.
        own_optimizer: the script makes the optimizer, so the configuration names none.
        on_cpu: DeepSpeed also trains it on a CPU; otherwise the real run uses the null CUDA.
    """

    name: str
    script: str = "train.py"
    variant: str = ""
    folder: Path = PROGRAMS / "memory"
    stage: int = 2
    settings: Mapping[str, Any] = field(default_factory=lambda: _BF16)
    needs: str = ""
    own_optimizer: bool = False
    on_cpu: bool = True

    def config(self, micro_batch: int) -> dict[str, Any]:
        base: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 2_000_000},
        }
        if self.own_optimizer:
            del base["optimizer"]
            base["zero_force_ds_cpu_optimizer"] = False
        return ds_config.merge(base, copy.deepcopy(dict(self.settings)))

    def words(self, config: str, micro_batch: int) -> list[str]:
        values = {"config": config, "size": micro_batch, "out": tempfile.gettempdir()}
        words = [word.format(**values) for word in self.script.split()]
        own = ["--variant", self.variant, "--deepspeed_config", config]
        return words if "{config}" in self.script else [*words, *own]


_TRANSFORMERS = "transformers_models.py"
_OF_FRAMEWORK: dict[str, Any] = {"folder": PROGRAMS / "frameworks"}
_OWN: dict[str, Any] = {"settings": _OWN_OPTIMIZER, "own_optimizer": True}
_ON_GPU = f"trainer.py --output_dir {{out}} --deepspeed {{config}} --{_BATCH} {{size}} --width 256"
_ON_GPU += " --bf16 --learning_rate 1e-3 --max_steps 1000 --save_strategy no --report_to none"
_ON_CPU, _RECOMPUTING = f"{_ON_GPU} --use_cpu", f"{_ON_GPU} --use_cpu --gradient_checkpointing"
_LOOP = f"loop.py --deepspeed_config {{config}} --{_BATCH} {{size}} --width 256"
STYLES = (
    Style("engine.backward(loss)"),
    Style("loss.backward()", variant="loss.backward", stage=3),
    Style("two forward passes for a loss", variant="pairs", stage=3),
    Style("fp32", stage=1, settings=_FP32),
    Style("fp16", settings=_FP16, on_cpu=False),
    Style("torch.autocast of the script", variant="autocast", settings=_FP32),
    Style("torch_autocast section", settings=_AUTOCAST),
    Style("torch_autocast section, stage 3", stage=3, settings=_AUTOCAST),
    Style("bf16 master weights, gradients and states", settings=_MASTER),
    Style("the same, stage 3", stage=3, settings=_MASTER),
    Style("the same with torch_autocast", stage=3, settings={**_MASTER, **_AUTOCAST}),
    Style("Muon", settings=_MUON),
    Style("Muon, stage 3", stage=3, settings=_MUON_STAGE_3),
    Style("torch.utils.checkpoint, reentrant", "train.py --model gpt_reentrant"),
    Style("torch.utils.checkpoint, non-reentrant", "train.py --model gpt_remat", stage=3),
    Style("deepspeed.zero.Init", variant="zero.Init", stage=3),
    Style("engine.compile()", variant="compile"),
    Style("Trainer", _ON_CPU, **_OF_FRAMEWORK),
    Style("Trainer that wants a GPU", _ON_GPU, on_cpu=False, **_OF_FRAMEWORK),
    Style("Trainer, gradient checkpointing", _RECOMPUTING, stage=3, **_OF_FRAMEWORK),
    Style("accelerate, optimizer of the script", _LOOP, **_OF_FRAMEWORK, **_OWN),
    Style(
        "Lightning's DeepSpeedStrategy", "on_lightning.py", needs="lightning", on_cpu=False, **_OWN
    ),
    Style("CUDA named everywhere", "only_cuda.py", settings=_FP32, on_cpu=False),
    Style("transformers, SDPA", _TRANSFORMERS),
    Style("transformers, eager attention", _TRANSFORMERS, "eager attention"),
    Style("tied weights", _TRANSFORMERS, "tied weights", stage=3),
    Style("LoRA of PEFT", _TRANSFORMERS, "lora", needs="peft"),
    Style("mixture of experts", _TRANSFORMERS, "moe"),
    Style("packed sequences", _TRANSFORMERS, "packed"),
    Style("vision", _TRANSFORMERS, "vision", settings=_FP32),
    Style("vision and language", _TRANSFORMERS, "vision and language"),
)
