"""Differences between versions of libraries, tested on both sides."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils import backend_registration

from dsat.simulation.versions import device_types, transformers_models

ROOT = Path(__file__).parents[2]
NEWER = "_setup_privateuseone_for_python_backend"  # since torch 2.10

# Runs in a child process, as devices and operators stay registered in torch.
OF_OLDER_TORCH = """
    import sys
    import torch
    from torch.utils import backend_registration

    from dsat.simulation.versions import device_types

    if sys.argv[1] == "older":
        del backend_registration._setup_privateuseone_for_python_backend

    class Module:
        def __getattr__(self, name):
            return lambda *_: 0

    device_types.register("dsat", Module())
    with torch._subclasses.FakeTensorMode():
        weight = torch.ones(4, 4, device="dsat", requires_grad=True)
        (weight @ torch.ones(4, device="dsat")).sum().backward()
    print(weight.grad.device)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["newer", "older"])
def test_a_device_is_known_to_autograd(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch has no devices written in Python, the guard is compiled, once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = textwrap.dedent(OF_OLDER_TORCH)
    for _ in range(2):
        told = subprocess.run(
            [sys.executable, "-c", code, version], capture_output=True, text=True, check=False
        )
        assert told.stdout.strip() == "dsat:0", told.stderr
    built = version == "older" or not hasattr(backend_registration, NEWER)
    assert len(list(tmp_path.rglob("*.so"))) == built


def test_without_a_compiler_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delattr(backend_registration, NEWER, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler"):
        device_types.register("dsat", SimpleNamespace())


@pytest.mark.parametrize(("known", "name"), [({"dtype": None}, "dtype"), ({}, "torch_dtype")])
def test_a_models_type_has_the_name_that_transformers_knows(
    known: dict[str, None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(PretrainedConfig=lambda: SimpleNamespace(**known))
    monkeypatch.setitem(sys.modules, "transformers", library)
    assert transformers_models.type_argument(torch.bfloat16) == {name: torch.bfloat16}


@pytest.mark.nightly
@pytest.mark.parametrize("version", [("2.5.1", "0.15.4"), ("2.9.1", "0.18.9")])
def test_an_installation_leaves_torch_and_deepspeed_as_they_are(
    version: tuple[str, str], tmp_path: Path
) -> None:
    """Checks what pip would do in an environment that claims to have them; needs the package
    index."""
    place = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    [packages] = place.glob("lib/python*/site-packages")
    for name, number in zip(("torch", "deepspeed"), version, strict=True):
        folder = packages / f"{name}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        )
        (folder / "RECORD").write_text("")
    uv = Path(sys.executable).with_name("uv")
    told = subprocess.run(
        [uv, "pip", "install", "--dry-run", "--python", place / "bin" / "python", ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    added = [line.split("==")[0] for line in told.stderr.splitlines() if line.startswith(" + ")]
    assert " + numpy" in added, told.stderr
    assert " + deepspeed" not in added
    assert not [name for name in added if name.startswith((" + torch", " + nvidia"))]
