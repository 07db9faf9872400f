"""`dsat doctor`, in real and in made-up environments."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dsat import doctor
from dsat.cli.main import main as dsat_main
from dsat.doctor import FAILS, OK, WARNING, Finding
from dsat.engines.machines.machine import Machine
from dsat.prepare import packages
from testing.local import PATIENCE_S

GPUS = Machine("cuda", "NVIDIA H100", ("0", "1"), ("CUDA_VISIBLE_DEVICES",), 80 * 2**30)


def told(**variables: str) -> tuple[int, str, dict[str, dict[str, str]]]:
    """Run the real command; return its exit status, the worst state and the findings by part."""
    done = subprocess.run(
        [sys.executable, "-m", "dsat", "doctor", "--json"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer["state"], {each["part"]: each for each in answer["findings"]}


@pytest.fixture(autouse=True)
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_machine", lambda: GPUS)


def found(part: str) -> Finding:
    """Return the finding on a part in this process; an empty one if there is none."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = dsat_main(["doctor", "--json"])
    answer = json.loads(out.getvalue())
    assert status == (answer["state"] == FAILS)
    findings = [Finding(**each) for each in answer["findings"] if each["part"] == part]
    return findings[0] if findings else Finding("", "")


@pytest.mark.slow
def test_the_environment_of_the_tests_runs_trials() -> None:
    status, worst, parts = told()
    assert status == 0 and worst == WARNING
    assert (
        parts["accelerators"]["state"] == WARNING and "CPU core" in parts["accelerators"]["found"]
    )
    assert parts["torch"]["found"].startswith(version("torch"))
    assert parts["C++ compiler"]["state"] == OK
    assert "CUDA toolkit" not in parts, "no device, no operator for one"
    assert all(bool(part["problem"]) == (part["state"] != OK) for part in parts.values())
    assert all(bool(part["remedy"]) == (part["state"] != OK) for part in parts.values())


@pytest.mark.slow
def test_what_would_not_work_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('libcudart.so.12 is missing')\n")
    status, worst, parts = told(CXX="no-such-compiler", PYTHONPATH=str(tmp_path))
    assert status == 1 and worst == FAILS
    assert "libcudart.so.12 is missing" in parts["accelerators"]["problem"]
    assert "import deepspeed" in parts["accelerators"]["remedy"]
    assert "no-such-compiler" in parts["C++ compiler"]["found"]


def test_a_deepspeed_with_known_faults_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = packages.version
    faulty = {"deepspeed": "0.18.2"}
    monkeypatch.setattr(packages, "version", lambda n: faulty.get(n) or version(n))
    finding = found("deepspeed")
    assert finding.state == WARNING and "stage 2, gradient accumulation" in finding.problem
    assert finding.remedy == "pip install deepspeed==0.19.5"


def test_packages_are_held_to_what_dsat_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=99", "no-such-package>=2", "pyyaml; python_version < '3'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: required)
    torch, missing = found("torch"), found("no-such-package")
    assert torch.state == FAILS and ">=99" in torch.problem
    assert missing.state == FAILS and missing.remedy == "pip install 'no-such-package>=2'"
    assert not found("pyyaml").part


@pytest.mark.parametrize(
    ("release", "state"), [("13.9", OK), ("11.8", WARNING)], ids=["same major", "another major"]
)
def test_cudas_compiler_fits_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, state: str
) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(doctor, "_cuda_of_torch", lambda: "13.2")
    toolkit = found("CUDA toolkit")
    assert toolkit.state == state and release in toolkit.found
    assert ("cuda-toolkit=13.2" in toolkit.remedy) == (state == WARNING)
    nvcc.unlink()
    assert found("CUDA toolkit").found == "no nvcc"


def test_operators_that_were_built_in_advance_need_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DS_BUILD_FUSED_ADAM=1 builds them so; older versions also compile CPUAdam with nvcc."""
    package = tmp_path / "deepspeed"
    (package / "ops" / "op_builder").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ops" / "op_builder" / "cpu_adam.py").touch()
    installed = package / "git_version_info_installed.py"
    installed.write_text("installed_ops = {'fused_adam': True, 'cpu_adam': False}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "deepspeed")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    toolkit = found("CUDA toolkit")
    assert toolkit.state == WARNING
    assert "CPUAdam" in toolkit.problem and "FusedAdam" not in toolkit.problem
    assert "torch_adam" in toolkit.remedy
    installed.write_text("installed_ops = {'fused_adam': True, 'cpu_adam': True}")
    assert found("CUDA toolkit").state == OK


def test_small_shared_memory_is_dockers(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 64 * 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert found("/dev/shm").state == WARNING
    assert "--shm-size" in found("/dev/shm").remedy


def test_a_configured_cluster_takes_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        monkeypatch.setenv("DET_MASTER", address)
        place = found("trials run on")
    assert place.state == OK and place.found.startswith("this machine for a command; ")
    assert place.found.endswith(f"the cluster at {address} for an experiment file")
    # Nobody listens there any more, or DET_MASTER is mistyped.
    for nowhere in (address, f"https://{address}", "http://", "localhost:x", "http://[::1:8"):
        monkeypatch.setenv("DET_MASTER", nowhere)
        assert "cannot be reached" in found("trials run on").problem


def test_a_compiler_of_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} g++")
    assert found("C++ compiler").found == sys.executable
