"""Checks of the environment in which trials would run: `dsat doctor`."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import re
import runpy
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsat.engines import places
from dsat.engines.machines.machine import find_machine
from dsat.engines.places.base import Environment
from dsat.errors import EngineError
from dsat.prepare import packages
from dsat.values import format as fmt
from dsat.values import hazards

OK, WARNING, FAILS = "ok", "warning", "fails"
# Packages that `dsat doctor` lists in addition to dsat's requirements.
_FRAMEWORKS = ("transformers", "accelerate", "trl", "peft", "lightning", "determined")
_SHARED, _SHARED_BYTES = "/dev/shm", 2**30  # noqa: S108  (Docker provides 64 MiB)
_NVCC_LIMIT_S, _MASTER_LIMIT_S = 20.0, 3.0


@dataclass(frozen=True)
class Finding:
    """Result of the check of one part of the environment.

    Attributes:
        state: "ok"; "warning" if trials run, but something else does not work; "fails" if no trial
            can run.
        problem: what does not work, and why; empty if everything works.
    """

    part: str
    found: str
    state: str = OK
    problem: str = ""
    remedy: str = ""


def examine(cluster: str | None) -> list[Finding]:
    """Check this process's environment without changing it.

    Args:
        cluster: address of the configured Determined master, if any.
    """
    findings = list(_packages())
    # Finding accelerators needs torch and DeepSpeed.
    if all(packages.version(name) is not None for name in packages.TRAINING):
        findings += _accelerators()
    return [*findings, _compiler(), _shared_memory(), _place(cluster)]


def _accelerators() -> Iterator[Finding]:
    try:
        machine = find_machine()
    except EngineError as error:
        problem, _, remedy = str(error).partition(" Check that ")
        remedy = f"check that {remedy}" if remedy else "see the message"
        yield Finding("accelerators", "unknown", FAILS, problem, remedy)
        return
    found, notes = machine.describe(), "; ".join(machine.warnings)
    if machine.is_cpu:
        problem = "DeepSpeed finds no GPU, so trials run on CPU cores"
        remedy = "no action is needed for a first try, or for `dsat estimate`"
        if ctypes.util.find_library("cuda") is not None:
            problem += ", although an NVIDIA driver is installed"
            remedy = (
                "install torch for this driver's CUDA version, and check that CUDA_VISIBLE_DEVICES "
                "is not empty"
            )
        yield Finding("accelerators", found, WARNING, problem, remedy)
    elif notes:
        remedy = "choose free devices with CUDA_VISIBLE_DEVICES, or end the programs that use them"
        if "in use by" not in notes:  # a warning about too few cores
            remedy = "allow more CPU cores, or use fewer devices (--max-slots)"
        yield Finding("accelerators", found, WARNING, notes, remedy)
    else:
        yield Finding("accelerators", found)
    if machine.accelerator == "cuda":
        yield _toolkit()


def _packages() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for requirement in packages.requirements():
        name = requirement.name
        found, remedy = packages.version(name), f"pip install '{name}{requirement.specifier}'"
        if found is None:
            yield Finding(name, "missing", FAILS, "no trial can run without it", remedy)
        elif not requirement.specifier.contains(found, prereleases=True):
            problem = f"no trial can run: dsat needs {requirement.specifier}"
            yield Finding(name, found, FAILS, problem, remedy)
        elif name == "torch":
            yield Finding(
                name,
                f"{found}, with CUDA {_cuda_of_torch()}"
                if _cuda_of_torch()
                else f"{found}, without CUDA",
            )
        elif name == "deepspeed":
            yield _deepspeed(found)
    there = {name: packages.version(name) for name in _FRAMEWORKS}
    said = ", ".join(f"{name} {found}" for name, found in there.items() if found is not None)
    yield Finding(
        "frameworks", said or "none that dsat knows (a plain DeepSpeed script needs none)"
    )


def _deepspeed(version: str) -> Finding:
    faults = hazards.find_by_version(version)
    if not faults:
        return Finding("deepspeed", version)
    problem = "; ".join(f"{each.effect} ({each.condition})" for each in faults)
    remedy = f"pip install deepspeed=={hazards.unaffected_version(faults)}"
    return Finding("deepspeed", version, WARNING, f"known faults: {problem}", remedy)


def _compiler() -> Finding:
    part, [compiler, *_] = "C++ compiler", os.environ.get("CXX", "").split() or ["g++"]
    if path := shutil.which(compiler):
        return Finding(part, path)
    problem = (
        "DeepSpeed cannot compile its operators: CPUAdam for offloading, FusedAdam, communication "
        "between ranks on a CPU"
    )
    remedy = "apt install g++, or conda install -c conda-forge gxx"
    return Finding(part, f"no {compiler}", WARNING, problem, remedy)


def _toolkit() -> Finding:
    """Check nvcc, where torch 2.15 would find it (torch/utils/cpp_extension.py)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    named = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    nvcc = (None if home else shutil.which("nvcc")) or (str(named) if named.is_file() else None)
    wanted = _cuda_of_torch()
    remedy = f"conda install -c nvidia cuda-toolkit={wanted}, and set CUDA_HOME"
    if nvcc is None:
        operators = _operators_without_nvcc()
        if not operators:
            return Finding("CUDA toolkit", "no nvcc (DeepSpeed's optimizers do not need it)")
        problem = f"DeepSpeed cannot compile {' and '.join(operators)}"
        remedy += (
            '. Or use torch\'s optimizer ("torch_adam": true in optimizer.params), which works '
            "with offloading too"
        )
        return Finding("CUDA toolkit", "no nvcc", WARNING, problem, remedy)
    release = _release(nvcc)
    found = f"{nvcc} {release or 'does not answer'}"
    # op_builder/builder.py of deepspeed 0.19.8, `assert_no_cuda_mismatch`
    if wanted and release and wanted.split(".")[0] != release.split(".")[0]:
        problem = (
            f"torch has CUDA {wanted}, so DeepSpeed refuses to compile operators with this nvcc"
        )
        return Finding("CUDA toolkit", found, WARNING, problem, remedy)
    return Finding("CUDA toolkit", found)


def _operators_without_nvcc() -> list[str]:
    """Return DeepSpeed's optimizers that need nvcc, because installation did not compile them."""
    built = _read_module("deepspeed", "git_version_info_installed.py").get("installed_ops", {})
    # DeepSpeed 0.19.8 has no such file: it compiles CPUAdam with a C++ compiler alone.
    by_nvcc = {"fused_adam": "FusedAdam"}
    if _file_of("deepspeed", "ops/op_builder/cpu_adam.py").exists():
        by_nvcc["cpu_adam"] = "CPUAdam, for offloading"
    return [name for key, name in by_nvcc.items() if not built.get(key)]


def _cuda_of_torch() -> str:
    return _read_module("torch", "version.py").get("cuda") or ""


def _read_module(package: str, name: str) -> dict[str, Any]:
    """Run one file of a package, without importing the package, and return its variables."""
    try:
        return runpy.run_path(str(_file_of(package, name)))
    except OSError:
        return {}


def _file_of(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(*folders[:1], name)


def _release(nvcc: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            [nvcc, "--version"], capture_output=True, text=True, timeout=_NVCC_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    release = re.search(r"release ([\d.]+)", done.stdout)
    return release[1] if release else ""


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage(_SHARED).free
    except OSError:
        free = 0
    if free >= _SHARED_BYTES:
        return Finding(_SHARED, f"{fmt.memory(free)} free")
    problem = "NCCL and data loader workers need more space there, or fail with a bus error"
    remedy = "in Docker: docker run --shm-size=8g, or --ipc=host"
    return Finding(_SHARED, f"{fmt.memory(free)} free", WARNING, problem, remedy)


def _place(cluster: str | None) -> Finding:
    place = places.detect(Environment(os.environ))
    here = "this machine" if place == "local" else f"--engine {place}"
    if cluster is None:
        return Finding("trials run on", here)
    found = f"{here} for a command; the cluster at {cluster} for an experiment file"
    try:  # determined's default ports (common/api/_util.py)
        parts = urlsplit(cluster if "://" in cluster else f"http://{cluster}")
        port = parts.port or (443 if parts.scheme == "https" else 8080)
        socket.create_connection((parts.hostname or cluster, port), _MASTER_LIMIT_S).close()
    except (OSError, ValueError) as error:  # ValueError: malformed address
        problem = f"the cluster cannot be reached: {error}"
        remedy = "correct DET_MASTER or `det user login`, or add --engine local"
        return Finding("trials run on", found, WARNING, problem, remedy)
    return Finding("trials run on", found)


def worst(findings: list[Finding]) -> str:
    """Return the worst state: "fails", else "warning", else "ok"."""
    return max((each.state for each in findings), key=(OK, WARNING, FAILS).index)
