"""Compile the null CUDA against the CUDA headers that the installed torch brings."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCES = Path(__file__).parent / "src"
_LIBRARIES = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
# Functions with these names that the sources do not define succeed without doing anything.
_GENERATED = re.compile(r"(?:cublas|cudnn|nccl)[A-Z]\w+")
_DEFINED = re.compile(r"[ T] ((?:cublas|cudnn|nccl)[A-Z]\w+)$", re.MULTILINE)


class NullCudaUnavailable(Exception):
    """The null CUDA cannot be compiled or used here."""


@dataclass(frozen=True)
class Libraries:
    """The compiled null CUDA.

    Attributes:
        preload: library that replaces the CUDA runtime, cuBLAS, cuDNN and NCCL.
        driver: folder of libcuda.so.1.
        nvml: folder of libnvidia-ml.so.1.
    """

    preload: Path
    driver: Path
    nvml: Path


def build(folder: Path) -> Libraries:
    """Return the libraries below `folder`, compiled unless they exist for the same sources.

    Raises:
        NullCudaUnavailable: there is no C compiler, or the installed torch has no CUDA.
    """
    torch, include = _installed()
    digest = hashlib.sha256(str(torch.stat().st_mtime_ns).encode())
    for path in [*sorted(_SOURCES.rglob("*.[ch]")), Path(__file__)]:
        digest.update(path.read_bytes())
    built = folder / digest.hexdigest()[:16]
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder))
        _compile(fresh, torch, include)
        try:
            fresh.rename(built)
        except OSError:  # another process was first
            shutil.rmtree(fresh)
    return Libraries(built / "libnullcuda.so", built / "driver", built / "nvml")


def _installed() -> tuple[Path, list[Path]]:
    """Return the folder of torch's libraries, and the folders of the CUDA headers."""
    torch, nvidia = (importlib.util.find_spec(name) for name in ("torch", "nvidia"))
    libraries = Path(str(torch.origin)).parent / "lib" if torch else Path()
    if not (libraries / "libtorch_cuda.so").exists():
        raise NullCudaUnavailable("the tests of GPUs need a torch that was built for CUDA")
    roots = [Path(path) for path in (nvidia.submodule_search_locations or ())] if nvidia else []
    include = [path for root in roots for path in sorted(root.glob("*/include"))]
    if not any((path / "cuda_runtime_api.h").exists() for path in include):
        raise NullCudaUnavailable(
            "the tests of GPUs need CUDA's headers, which torch's packages nvidia-* bring along"
        )
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        raise NullCudaUnavailable(
            "the tests of GPUs compile a CUDA without a device: install gcc and binutils "
            "(DeepSpeed needs a compiler as well)"
        )
    return libraries, include


def _compile(folder: Path, torch: Path, include: list[Path]) -> None:
    headers = [f"-I{_SOURCES}", *(f"-I{path}" for path in include)]
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror=implicit-function-declaration"]
    options += ["-Wno-unused-variable", *headers]
    written = [
        _SOURCES / f"{name}.c" for name in ("books", "calls", "runtime", "libraries", "nccl")
    ]
    library = folder / "libnullcuda.so"
    _run("gcc", *options, "-o", library, *written, "-lpthread")
    defined = set(_DEFINED.findall(_run("nm", "-D", "--defined-only", library)))
    asked = {
        name
        for path in _LIBRARIES
        if (torch / path).exists()
        for name in _GENERATED.findall(_run("nm", "-D", "--undefined-only", torch / path))
    }
    stubs = folder / "stubs.c"
    lines = [f"STUB({name})" for name in sorted(asked - defined)]
    define = "#define STUB(name) int name(void) { return call_enter(#name, 0); }"
    stubs.write_text("\n".join(['#include "calls.h"', define, *lines]) + "\n")
    _run("gcc", *options, "-o", library, *written, stubs, "-lpthread")
    for name, soname, sources in (
        ("driver", "libcuda.so.1", ["driver.c"]),
        ("nvml", "libnvidia-ml.so.1", ["nvml.c", "books.c"]),
    ):
        (folder / name).mkdir()
        paths = [_SOURCES / source for source in sources]
        _run("gcc", *options, f"-Wl,-soname,{soname}", "-o", folder / name / soname, *paths)


def _run(*command: str | Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    process = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment
    )
    if process.returncode:
        raise NullCudaUnavailable(f"{command[0]} failed:\n{process.stderr}")
    return process.stdout
