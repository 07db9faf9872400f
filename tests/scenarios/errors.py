"""Mistakes of users: what they type, and the place and words that the message must contain.

The full messages are in `messages.txt`, which `python -m testing.messages` rewrites.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MICRO, GAS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
DS = {MICRO: 4, "zero_optimization": {"stage": 1}}
CONFIG, OVERWRITE = "hyperparameters.deepspeed_config", "hyperparameters.overwrite_deepspeed_args"
ZERO, STAGE = "zero_optimization", "zero_optimization.stage"
VARIABLES = "environment.environment_variables"
SCRIPT = "train.py --deepspeed_config ds.json"


@dataclass(frozen=True)
class Mistake:
    """What a user types, and files in addition to those of `User.has`, by name.

    Attributes:
        where: the beginning of the message.
        words: further words in the message.
    """

    types: str
    where: str
    words: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        files = (f"{name}: {_short(text)}" for name, text in self.files.items())
        return "\n".join([f"dsat {self.types}", *files])


def _short(text: str | bytes) -> str:
    found = repr(text)[1:-1] if isinstance(text, str) else repr(text)[2:-1]
    return found if len(found) < 400 else f"{found[:60]}..."


# What is wrong in an `autotuning` section: the key, its value, and words of the message.
_SECTION: list[tuple[str, Any, str]] = [
    ("", [], "mapping"),
    ("tuner_typ", "random", "tuner_typ tuner_type"),
    ("metric", "latencies", "latencies latency"),
    ("tuner_type", "xgboost", "gridsearch random model_based xgboost"),
    ("mp_size", 2, "2 model"),
    ("num_nodes", 2, "2 machine"),
    ("num_gpus", 8, "8 2"),
    ("fast", 1, "true false 1"),
    ("results_dir", "", "folder"),
    ("exps_dir", 3, "folder 3"),
    ("arg_mappings", ["--b"], "mapping ['--b']"),
    ("arg_mappings", {MICRO: "batch"}, f"{MICRO} --batch"),
    ("arg_mappings.train_micro_batch_size", "--b", f"train_micro_batch_size {MICRO}"),
    *(("arg_mappings.train_batch_size", bad, repr(bad)) for bad in (3, " -- ", "--b 3")),
    *(("tuner_num_trials", bad, "positive integer") for bad in (True, "3", 0, [2])),
    ("max_train_batch_size", -1, "0 -1"),
]
# What is wrong in a DeepSpeed configuration: the whole, the key, and words of the message.
_CONFIG: list[tuple[dict[str, Any], str, str]] = [
    ({"train_batch_size": [8, 16]}, "train_batch_size", f"list {MICRO} {GAS}"),
    *(({MICRO: [1, bad]}, MICRO, f"positive integer {bad!r}") for bad in ("2", True, 0, [2])),
    ({MICRO: []}, MICRO, "empty"),
    ({MICRO: {"type": "int", "minval": 1}}, MICRO, "range int"),
    *(({key: value}, key, f"positive integer {value!r}") for key, value in ((MICRO, True),)),
    *(({"train_batch_size": 8, GAS: bad}, GAS, f"{bad!r}") for bad in ("4", 4.5, 0)),
    *(({**DS, ZERO: {"stage": bad}}, STAGE, f"0 1 2 3 {bad!r}") for bad in (4, "one", None)),
    *(({**DS, ZERO: {"stage": bad}}, STAGE, "") for bad in ([], [1, 4], [0, True])),
    *(({**DS, ZERO: bad}, ZERO, "mapping") for bad in ("most", 2, [{"stage": 1}])),
    *(({**DS, ZERO: {"reduce_bucket_size": bad}}, ZERO, "integer") for bad in ("most", -1)),
    ({**DS, ZERO: {"overlap_comm": [[True]]}}, f"{ZERO}.overlap_comm", "list"),
    ({**DS, ZERO: {"overlap_comm": {"type": "categorical"}}}, f"{ZERO}.overlap_comm", "vals"),
    ({**DS, ZERO: {"offload_optimizer": {"device": "cpu", "pin_memory": []}}}, ZERO, "empty"),
    ({**DS, ZERO: {"zenflow": {}}}, f"{ZERO}.zenflow", "ZenFlow"),
    ({**DS, "sequence_parallel_size": 3}, "", "3 multiple devices"),
    *(
        (dict(zip(("train_batch_size", MICRO, GAS), sizes, strict=True)), "", "2 devices")
        for sizes in ((32, 4, 2), (32, 5, None), (32, None, 5), (1, None, None))
    ),
    ({}, "", f"train_batch_size {MICRO}"),
    ({GAS: 4}, "", f"train_batch_size {MICRO}"),
    ({"train_batch_size": "auto", MICRO: "auto"}, "", f"auto {MICRO}"),
]
# What is wrong in an experiment: the key, its value, the place and words.
_EXPERIMENT: list[tuple[str, Any, str, str]] = [
    *(("entrypoint", bad, "entrypoint", "entrypoint") for bad in (None, 5)),
    *(("hyperparameters", bad, "hyperparameters", CONFIG) for bad in (None, "x")),
    *((CONFIG, bad, CONFIG, "path") for bad in (None, "", 3)),
    *((CONFIG, bad, CONFIG, f"file {bad!r}") for bad in ("other.json", ".")),
    *((f"{CONFIG}.{STAGE}", bad, f"{CONFIG}: {STAGE}", "0 1 2 3") for bad in (4, None)),
    (f"{OVERWRITE}.{STAGE}", 4, f"{OVERWRITE}: {STAGE}", "0 1 2 3"),
    ("hyperparameters.lr", {"type": "log", "minval": 1}, "hyperparameters.lr", "range"),
    (CONFIG, {"type": "log", "minval": 1}, CONFIG, "range"),
    *(
        ("resources.slots_per_trial", bad, "resources.slots_per_trial", "positive integer")
        for bad in (0, "two", True)
    ),
    ("resources.slots_per_trial", 3, "", "3 2 --devices"),
    ("searcher", "single", "searcher", "mapping"),
    *(
        ("searcher.max_length", bad, "searcher.max_length", "whole number")
        for bad in (None, "100 batches", True, {}, {"batches": None}, {"batches": 1, "epochs": 2})
    ),
    *((VARIABLES, bad, VARIABLES, "list") for bad in ("A=1", {"cuda": "A=1"})),
    *((VARIABLES, ["B=1", bad], VARIABLES, "NAME=VALUE") for bad in ("A", "=1")),
]
# What is wrong in an entrypoint, and words of the message.
_ENTRYPOINT: dict[str, str] = {
    **dict.fromkeys(("LR=0.1", "''"), "no program"),
    **dict.fromkeys(("python3 train.py && ls", "python3 train.py | tee log"), "shell"),
    **dict.fromkeys(("python3 train.py > log", "python3 train.py --dir $HOME"), "shell"),
    **dict.fromkeys(("python3 train.py $(nproc)", "python3 train.py `nproc`"), "shell"),
    "python3 'train.py": "quotation",
    "python3 -m determined.launch.deepspeed bash run.sh": "'bash'",
    "accelerate launch train.py": "'accelerate'",
    "python3 missing.py": "'missing.py'",
    **dict.fromkeys(("python3", "python3 -c 'print(1)'", "python3 -m"), "script"),
    "python3 -m determined.launch.deepspeed": "script",
    "python3 -m determined.launch.torch_distributed --": "script",
    "python3 -m determined.launch.deepspeed --trial a:B more": "--trial module:Class",
    "deepspeed --num_gpus 2": "deepspeed script",
    "torchrun --nproc_per_node 2": "torchrun script",
    "torchrun --nnodes 1:4 train.py": "--nnodes 1:4",
    "/opt/other/bin/python3 train.py": "/opt/other/bin/python3",
    "python3.6 train.py": "python3.6",
    **{f"deepspeed --bind_core_list {bad} train.py": bad for bad in ("4,2", "3-1", "a", "1,")},
    "deepspeed --include localhost:999 train.py": "999",
    "deepspeed --num_gpus 4 train.py": "4",
    f"deepspeed {SCRIPT.replace('ds.json', 'other.json')}": "other.json ds.json",
    "deepspeed --num_gpus two train.py": "--num_gpus two number",
}
# What cannot be chosen of `hosts`, and words of the message.
_HOSTS = "a slots=4\nb slots=4\nc slots=2\n"
_HOSTFILE: list[tuple[str, str, str]] = [
    (_HOSTS, "", "4 a 2 c --num_gpus"),
    ("a slots=2\nb slots=2\n", "--num_nodes 3", "--num_nodes 3 2"),
    ("a slots=2\nb slots=2\n", "--num_nodes 2.5", "--num_nodes 2.5 number"),
    ("a slots=2\nb slots=2\n", "--include d", "--include d"),
    ("a slots=2\nb slots=2\n", "--include a:5@b:0", "a:5 5"),
    ("a\nb\n", "--exclude a:0@b:0", "a:0"),
    ("a slots=2\nb slots=2\n", "--include a:x", "NAME:SLOT"),
    ("a slots=2\nb slots=2\n", "--exclude a@b", "leave"),
    ("a slots=1\nb slots=1\na slots=1\n", "", "a twice"),
    ("a\nb max_slots=2\n", "", "max_slots=2 slots=8"),
]
_BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 9)
)
# Files that cannot be read: name, content and words.
_FILES: list[tuple[str, str | bytes, str]] = [
    ("deepspeed.yaml", "a:\n\t- b", "2 1"),
    ("deepspeed.yaml", "a: [1\nb: 2", "YAML"),
    ("deepspeed.yaml", "a: 1\na: 2", "2 1"),
    ("deepspeed.yaml", "", "mapping"),
    ("deepspeed.yaml", "- a", "mapping"),
    ("deepspeed.yaml", "a: 2024-01-01", "date a"),
    ("deepspeed.yaml", "a: {b: 1}\nc: {d: [1, .nan]}", "NaN c.d.1"),
    ("deepspeed.yaml", "? [a, b]\n: c", ""),
    ("deepspeed.yaml", _BOMB, "1,000,000 aliases"),
    ("ds.json", '{\n"a": 1,\n', "JSON 3 1"),
    ("ds.json", '{"a": {"b": 1,\n"b": 2, "c": 1}}', "duplicate"),
    ("ds.json", '{"b": 1, "a": {"c": 1e999}}', "NaN a.c"),
    ("ds.json", '{"a": 1e999} // large', "too large"),
    ("ds.json", b"\xff\xfe", "UTF-8"),
    ("ds.json", "[1]", "mapping"),
    ("ds.json", '{"a":' * 20_000, "deeply"),
    ("ds.json", "zero_optimization:\n  stage: 1\n", f"{ZERO} mapping"),
]
# Configurations of models that cannot be predicted, and words of the message.
_MODELS: dict[str, str] = {
    "{": "JSON",
    "[]": "mapping",
    "{}": "model_type",
    '{"model_type": "llama", "quantization_config": {"bits": 4}}': "quantized",
}
# What is wrong in the words alone: the place and other words of the message.
_WORDS: list[tuple[str, str, str]] = [
    ("", "", "required"),
    ("guess deepspeed.yaml .", "", "guess model asha"),
    ("asha", "dsat asha", "command deepspeed"),
    ("estimate", "dsat estimate", "command --model"),
    ("asha deepspeed.yaml . -- train.py", "deepspeed.yaml", "command both"),
    ("asha python3 -u a.py -b 2", "", "a.py"),
    ("python3 train.py", "", "tune python3"),
    ("-- python3 t.py", "", "tune python3"),
    ("asha no.py", "", "no.py"),
    ("asha -- 'deepspeed train.py --x'", "", "quotes"),
    ("tune sbatch job.sh", "sbatch", "job script"),
    (f"tune A=1 docker run image {SCRIPT}", "docker", "inside container"),
    (f"tune ssh node {SCRIPT}", "ssh", "machine"),
    (f"tune sudo -E {SCRIPT}", "sudo", "sudo"),
    (f"tune srun --export=NONE {SCRIPT}", "--export=NONE", "--export=ALL"),
    ("tune 'python train.py'", "python train.py", "quotes"),
    ("tune 'A=1 deepspeed train.py'", "A=1 deepspeed train.py", "quotes"),
    ("tune 'cd sub && python train.py'", "cd sub && python train.py", "bash -c"),
    ("tune 'if true; then deepspeed train.py; fi'", "if true;", "bash -c"),
    ("tune cd sub", "cd", "bash -c"),
    ("tune ds.json", "ds.json", "--deepspeed_config ds.json"),
    ("asha deepspeed.yaml none", "none", "exist"),
    ("asha deepspeed.yaml train.py", "train.py", "folder"),
    ("asha no.yaml .", "no.yaml", "file"),
    ("asha deepspeed.yaml . --include lost", "lost", "exist"),
    ("asha -i x -- train.py", "--add-files", "experiment"),
    ("asha --ds-config d.json deepspeed.yaml .", "--ds-config", CONFIG),
    ("asha --ds-config no.json -- train.py", "--ds-config no.json", "file"),
    (f"asha --ds-config train.py -- {SCRIPT}", "--ds-config train.py", "ds.json"),
    (f"asha -- {SCRIPT.replace('ds.json', 'gone.json')}", "", "gone.json"),
    ("asha deepspeed.yaml . -z 4", "", "-z 4"),
    ("asha deepspeed.yaml . --end-profile-step 2", "--end-profile-step", "2 --start-profile-step"),
    ("binary deepspeed.yaml . --divisor 2", "", "--divisor"),
    ("asha deepspeed.yaml . --train-batch-size 7", "", "7 2"),
    ("asha deepspeed.yaml . --train-batch-size 12 --divisible-by 4", "", "12 8"),
    ("model --train-batch-size 7 --divisible-by 2 -- python train.py", "", "--train-batch-size"),
    ("asha --train-batch-size 4 --max-train-batch-size 4 -- t.py", "--train", "--max-train"),
    ("asha --min-micro-batch 4 --max-micro-batch 3 -- t.py", "--max-micro-batch", "3 4"),
    ("model --max-train-batch-size 3 --min-micro-batch 4 -- python train.py", "", "satisfies"),
    ("model --max-slots 1 --devices 2 -- python train.py", "--max-slots", "2 devices"),
    ("model --max-trials 1 -- train.py", "", "--max-trials 1 2"),
    (f"asha --devices 1 -- deepspeed --num_gpus 2 {SCRIPT}", "", "2 1"),
    *(
        (f"tune --dry-run python3 {bad} {SCRIPT}", "", f"{bad} hides dsat")
        for bad in "-I -E -sE".split()
    ),
    ("asha deepspeed.yaml . --search overlap_comm --keep overlap_comm", "", "overlap_comm --keep"),
    ("model --search overlap -- python train.py", "", "--search 'overlap'"),
    ("model --search packing -- python train.py", "", "packing tokens_per_second"),
    ("model --vary --dry-run -- t.py", "", "--vary argument"),
    ("model --vary optim -- t.py", "", "--vary 'optim'"),
    ("model --vary optim= -- t.py", "", "--vary 'optim='"),
    ("model --vary --=1 -- t.py", "", "--vary '--=1'"),
    ("model --vary gradient_checkpointing=some -- t.py", "", "--vary 'some'"),
    ("asha --arg-mapping batch -- t.py", "", "--arg-mapping 'batch' KEY=FLAG"),
    (f"asha --arg-mapping {MICRO}=--batch -- {SCRIPT}", "--arg-mapping", "--batch"),
    (f"asha --arg-mapping {MICRO}=--bacth -- {SCRIPT} --batch 2", "--arg-mapping", "--batch"),
    ("model --engine nowhere -- train.py", "", "--engine nowhere local slurm"),
    ("model --trial-timeout soon -- t.py", "", "--trial-timeout 'soon' 90s"),
    ("model --slot-memory 1023KiB -- t.py", "", "--slot-memory '1023KiB' 24GiB"),
    ("model --slot-memory 80 -- t.py", "", "--slot-memory '80' 80GiB"),
    ("model --run-dir train.py/run -- python train.py", "", "train.py: folder"),
    ("model --resume -- python train.py", "--resume", "dsat_runs/train-*"),
    ("model --resume --run-dir empty -- python train.py", "empty", "run"),
    ("asha deepspeed.yaml . --search-runner-config r.yaml", "--search-runner", "cluster"),
    (f"tune deepspeed -i one@two:0 {SCRIPT}", "entrypoint", "one@two:0 2"),
    ("tune --colour 2 t.py", "", "--colour"),
    ("tune --max-trials 5 t.py", "", "t.py"),
    ("tune --max-rungs 5 train.py", "--max-rungs", "model"),
    ("show", "", "dsat_runs"),
    ("show gone", "gone", "`dsat runs`"),
    ("show --trials --trial x", "--trial", "--trials"),
    ("runs nowhere", "nowhere", "folder"),
    ("compare a", "", "two"),
    ("export", "--to", "csv"),
    ("export --to excel", "", "--to excel csv"),
    ("watch --port none", "", "--port none"),
    ("estimate --model c -- t.py", "--model", "script"),
    ("estimate --seq-length 9 -- t.py", "--seq-length", "--model"),
    ("estimate --fits 8x80GiB --devices 8 -- t.py", "--fits", "--devices"),
    ("estimate --fits 8x80 -- t.py", "", "--fits '80' 80"),
    ("estimate --fits 8xH100,16xA100 -- t.py", "", "--fits H100,16xA100"),
    ("estimate --fits 8xH100 --fits 8xH200 -- t.py", "", "--fits twice"),
    ("estimate --lora r=0 --model c", "", "--lora 0"),
    ("estimate --model ./no/such/model", "--model ./no/such/model", "file folder"),
    ("project --to 9999999999xH100 -- t.py", "", "--to 9999999999"),
    ("project --to H100 --model c", "", "--to H100 64xH100"),
    ("project --to 8xH100,16xA100 --model c", "", "--to 8xH100,16xA100 64xH100"),
    ("project --to 8xH100 --to 8xH200 --model c", "", "--to twice"),
    ("project --to RTX-4090 --model c", "", "--to RTX-4090 64xH100"),
    ("project --to 8xK80 --model model.json", "", "K80 A100-40GB"),
    ("project --price 2 --model c", "--price", "--tokens"),
    ("project --tokens many --model c", "", "--tokens 'many' 300B"),
]


def mistakes() -> Iterator[Mistake]:
    """Yield all mistakes."""
    tune, dry = f"tune {SCRIPT}", "model --dry-run --devices 2 --ds-config ds.json -- train.py"
    experiment = "model deepspeed.yaml . --dry-run"
    for key, value, words in _SECTION:
        section = _nested(key, value)
        own = {**DS, "autotuning": {"enabled": True, **section} if key else value}
        yield Mistake(tune, "ds.json: autotuning", _words(words), {"ds.json": json.dumps(own)})
    for config, key, words in _CONFIG:
        sparse = {name: value for name, value in config.items() if value is not None}
        where = f"ds.json: {key}" if key else "ds.json"
        yield Mistake(dry, where, _words(words), {"ds.json": json.dumps(sparse)})
    for key, value, where, words in _EXPERIMENT:
        data = {
            "entrypoint": "python3 train.py",
            "hyperparameters": {"deepspeed_config": "ds.json"},
        }
        first, *below = key.split(".")
        wrong = _nested(".".join(below), value) if below else value
        merged = {**data.get(first, {}), **wrong} if below else wrong  # type: ignore[dict-item]
        text = json.dumps({**data, first: merged})
        place = f"deepspeed.yaml: {where}" if where else ""
        yield Mistake(experiment, place, _words(words), {"deepspeed.yaml": text})
    for line, words in _ENTRYPOINT.items():
        text = json.dumps({"entrypoint": line, "hyperparameters": {"deepspeed_config": "ds.json"}})
        yield Mistake(experiment, "", _words(words), {"deepspeed.yaml": text})
    for hosts, options, words in _HOSTFILE:
        line = f"model --dry-run -- deepspeed --hostfile hosts {options} {SCRIPT}"
        yield Mistake(line, "", _words(words), {"hosts": hosts})
    for name, content, words in _FILES:
        yield Mistake(experiment, name, _words(words), {name: content})
    for text, words in _MODELS.items():
        line, model = "estimate --model model.json", {"model.json": text}
        yield Mistake(line, "model.json", _words(words), model)
    for dtype, name, enabled in (("fp32", "bf16", True), ("bf16", "bf16", False)):
        own = {name: {"enabled": enabled}}
        files = {"config.json": '{"model_type": "llama"}', "ds.json": json.dumps(own)}
        line = f"estimate --model . --dtype {dtype} --ds-config ds.json"
        yield Mistake(line, f"--dtype {dtype}", ("precision", "--ds-config"), files)
    for bad in ("many", "0", "1.5", ""):
        flag = f"--per_device_train_batch_size={bad}"
        line = f"model --dry-run -- train.py --deepspeed ds.json --output_dir out {flag}"
        yield Mistake(line, "", ("--per_device_train_batch_size", "positive"), {"ds.json": "{}"})
    yield Mistake("estimate --model empty", "--model empty", ("config.json",), {"empty/x": ""})
    for name in (
        "best_ds_config.json",
        "best_ds_metrics.json",
        "report.html",
        "status.json",
        "trials",
    ):
        line = "model --run-dir empty -- python train.py"
        yield Mistake(line, "empty", (name,), {f"empty/{name}": "my own"})
    for line, where, words in _WORDS:
        yield Mistake(line, where, _words(words))


def _nested(path: str, value: Any) -> Any:
    for key in reversed(path.split(".") if path else ()):
        value = {key: value}
    return value


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def argv(mistake: Mistake) -> list[str]:
    """Return the arguments of `dsat`."""
    return shlex.split(mistake.types)
