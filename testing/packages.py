"""Frameworks that need their own versions of packages, installed outside the environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_INSTALLED = Path(__file__).parents[1] / ".cache" / "own_commands"
_OF_ALL = "dill multiprocess xxhash einops sentencepiece tiktoken"
_HUB = "httpx httpcore h11 anyio sniffio certifi idna shellingham typer hf-xet annotated-doc"


@dataclass(frozen=True)
class Packages:
    """Packages of a framework.

    Attributes:
        names: the requirements to install, without their dependencies.
        adapt: replacements in installed files for a machine without a GPU: path, old and new text.
    """

    names: str
    adapt: Mapping[str, tuple[str, str]] = field(default_factory=dict)


PACKAGES = {
    "TRL": Packages(f"trl==1.16.0 peft==0.21.2 datasets==5.2.0 {_OF_ALL}"),
    "LLaMA-Factory": Packages(
        "llamafactory==0.9.5 transformers==5.6.0 tokenizers==0.22.2 huggingface-hub==1.5.0 "
        "datasets==4.0.0 peft==0.18.1 trl==0.24.0 dill==0.3.8 multiprocess==0.70.16 xxhash "
        "fsspec==2025.3.0 omegaconf antlr4-python3-runtime==4.9.3 fire termcolor tyro==0.8.14 "
        f"docstring-parser shtab typeguard einops sentencepiece tiktoken {_HUB}",
        # Replaced: it is imported for audio, which no test has, and is not built for every torch.
        {"torchaudio.py": ("", '"""In the place of torchaudio."""\n')},
    ),
    "Axolotl": Packages(
        "axolotl==0.19.0 transformers==5.16.1 tokenizers==0.23.1 huggingface-hub==1.17.0 "
        "accelerate==1.13.0 datasets==4.8.4 peft==0.20.0 trl==1.9.0 optimum==1.16.2 addict art "
        "attrs axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 backoff "
        "bitsandbytes==0.50.2 cffi colorama distro evaluate fastcore fire gitdb gitpython "
        "immutabledict jsonschema jsonschema-specifications langdetect llvmlite mistral-common "
        "numba platformdirs posthog protobuf pycountry pycparser pydantic-extra-types "
        "python-dotenv referencing rpds-py schedulefree sentry-sdk smmap soundfile soxr termcolor "
        f"torchao==0.17.0 wandb zstandard {_OF_ALL} {_HUB}",
        # It requests NCCL by name, which needs GPUs.
        {"axolotl/utils/trainer.py": ('dist_backend="nccl"', 'dist_backend="gloo"')},
    ),
    "ms-swift": Packages(
        "ms-swift==4.6.0 transformers==5.19.0 datasets==4.8.4 peft==0.20.0 trl==0.29.1 addict "
        "attrdict binpacking dacite json-repair modelscope modelscope-hub nltk openai oss2 rouge "
        "simplejson sortedcontainers transformers-stream-generator zstandard aiohttp "
        f"importlib-metadata {_OF_ALL} {_HUB}",
    ),
}


def install(name: str) -> Path:
    """Install a framework unless it is installed; return the folder of its packages."""
    folder, packages = _INSTALLED / name, PACKAGES[name]
    done = folder / ".installed"
    if done.exists() and done.read_text() == packages.names:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    uv = str(Path(sys.executable).with_name("uv"))
    words = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps"]
    subprocess.run([*words, "--target", str(folder), *packages.names.split()], check=True)
    for path, (old, new) in packages.adapt.items():
        text = (folder / path).read_text() if old else ""
        (folder / path).write_text(text.replace(old, new) if old else new)
    done.write_text(packages.names)
    return folder
