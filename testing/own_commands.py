"""Axolotl, LLaMA-Factory, TRL and ms-swift, tuned with their own commands and files.

    python -m testing.own_commands [FRAMEWORK ...]

Each is installed beside the environment, in .cache/own_commands/, in versions that work together
and without torch, DeepSpeed and what is here already. The command that a search prints is run to
its end. Prints a line for each framework; ends with 1 if one of them was not tuned.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testing.command import run_of
from testing.local import PROGRAMS

ROOT = Path(__file__).parent.parent
FOLDER = PROGRAMS / "own_commands"
INSTALLED = ROOT / ".cache" / "own_commands"
OPTIONS = "--max-trials 4 --finals 0 --memory-model formula -m throughput --zero-stages 1 2"
OPTIONS += " --max-micro-batch 8 --end-profile-step 4 --run-dir run"
_OF_ALL = "dill multiprocess xxhash einops sentencepiece tiktoken"
_HUB = "httpx httpcore h11 anyio sniffio certifi idna shellingham typer hf-xet annotated-doc"


@dataclass(frozen=True)
class Framework:
    """A framework with its command.

    Attributes:
        command: as its users type it.
        file: that the command names.
        micro_batch: its key for the micro batch.
        packages: to install, without what they depend on.
        adapt: replacements in installed files for a machine without a GPU: path, old and new text.
        variables: that the command lacks on a machine without a GPU.
    """

    command: str
    file: str
    micro_batch: str
    packages: str
    adapt: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


FRAMEWORKS = {
    "TRL": Framework(
        "torchrun --nproc-per-node 1 -m trl.scripts.sft --config trl.yaml",
        "trl.yaml",
        "per_device_train_batch_size",
        f"trl==1.16.0 peft==0.21.2 datasets==5.2.0 {_OF_ALL}",
    ),
    "LLaMA-Factory": Framework(
        "FORCE_TORCHRUN=1 NPROC_PER_NODE=1 llamafactory-cli train llamafactory.yaml",
        "llamafactory.yaml",
        "per_device_train_batch_size",
        "llamafactory==0.9.5 transformers==5.6.0 tokenizers==0.22.2 huggingface-hub==1.5.0 "
        "datasets==4.0.0 peft==0.18.1 trl==0.24.0 dill==0.3.8 multiprocess==0.70.16 xxhash "
        "fsspec==2025.3.0 omegaconf antlr4-python3-runtime==4.9.3 fire termcolor tyro==0.8.14 "
        f"docstring-parser shtab typeguard einops sentencepiece tiktoken {_HUB}",
        # Imported for sound, of which there is none; not built for every torch.
        {"torchaudio.py": ("", '"""In the place of torchaudio."""\n')},
    ),
    "Axolotl": Framework(
        "axolotl train axolotl.yaml",
        "axolotl.yaml",
        "micro_batch_size",
        "axolotl==0.19.0 transformers==5.16.1 tokenizers==0.23.1 huggingface-hub==1.17.0 "
        "accelerate==1.13.0 datasets==4.8.4 peft==0.20.0 trl==1.9.0 optimum==1.16.2 addict art "
        "attrs axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 backoff "
        "bitsandbytes==0.50.2 cffi colorama distro evaluate fastcore fire gitdb gitpython "
        "immutabledict jsonschema jsonschema-specifications langdetect llvmlite mistral-common "
        "numba platformdirs posthog protobuf pycountry pycparser pydantic-extra-types "
        "python-dotenv referencing rpds-py schedulefree sentry-sdk smmap soundfile soxr termcolor "
        f"torchao==0.17.0 wandb zstandard {_OF_ALL} {_HUB}",
        # It asks for NCCL by name.
        {"axolotl/utils/trainer.py": ('dist_backend="nccl"', 'dist_backend="gloo"')},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"},
    ),
    "ms-swift": Framework(
        "NPROC_PER_NODE=1 swift sft swift.yaml",
        "swift.yaml",
        "per_device_train_batch_size",
        "ms-swift==4.6.0 transformers==5.19.0 datasets==4.8.4 peft==0.20.0 trl==0.29.1 addict "
        "attrdict binpacking dacite json-repair modelscope modelscope-hub nltk openai oss2 rouge "
        "simplejson sortedcontainers transformers-stream-generator zstandard aiohttp "
        f"importlib-metadata {_OF_ALL} {_HUB}",
    ),
}


def install(framework: Framework, name: str) -> Path:
    """Install a framework beside the environment, once; return the folder."""
    folder = INSTALLED / name
    done = folder / ".installed"
    if done.exists() and done.read_text() == framework.packages:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    uv = str(Path(sys.executable).with_name("uv"))
    words = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
    subprocess.run([*words, "--target", str(folder), *framework.packages.split()], check=True)
    for path, (old, new) in framework.adapt.items():
        text = (folder / path).read_text() if old else ""
        (folder / path).write_text(text.replace(old, new) if old else new)
    done.write_text(framework.packages)
    return folder


def environment(packages: Path, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of a framework's commands."""
    path = [packages / "bin", Path(sys.executable).parent, given["PATH"]]
    return {
        **given,
        "PATH": os.pathsep.join(map(str, path)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]),
        "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's, which knows no later ones
        "DS_ACCELERATOR": "cpu",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def tuned(name: str, folder: Path) -> str:
    """Tune a framework's training in a folder, and train with the printed command.

    Returns:
        "tuned" or what went wrong.
    """
    framework = FRAMEWORKS[name]
    env = environment(install(framework, name)) | dict(framework.variables)
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "make.py"], cwd=folder, check=True, capture_output=True)
    words = [sys.executable, "-m", "dsat", "model", *OPTIONS.split(), "--"]
    told = _run([*words, *shlex.split(framework.command)], folder, env)
    if told.returncode:
        return f"status {told.returncode}: {told.stderr.strip()[-600:]}"
    run = run_of(folder / "run")
    if run.best is None or len({trial.batch for trial in run.trials.values()}) < 2:
        return f"{len(run.trials)} trials of the same batch"
    copy = (folder / "run" / framework.file).read_text()
    wanted = f"{framework.micro_batch}: {run.best.batch.micro_batch}  # what fits"
    if wanted not in copy or "best_ds_config.json" not in copy:
        return f"the copy of its file is {copy}"
    said = (folder / "run" / "summary.md").read_text().partition("Train with it: `")[2]
    line = said.partition("`")[0]
    trained = _run(["bash", "-c", line], Path.home(), env)
    if trained.returncode:
        return f"{line}\nended with {trained.returncode}: {trained.stderr.strip()[-600:]}"
    return "tuned"


def _run(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=900
    )


def main() -> int:
    """Print a line for each framework; 1 if something was not tuned."""
    failed = 0
    for name in sys.argv[1:] or FRAMEWORKS:
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"dsat-own-command-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        found = tuned(name, folder)
        print(f"{name}: {found}", flush=True)
        failed += found != "tuned"
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
