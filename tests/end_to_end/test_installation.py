"""dsat as pip installs it, in an environment that lacks what only some scripts need."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Collection
from email.message import Message
from pathlib import Path

import pytest

import dsat

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = ROOT / "testing" / "programs"
QUICK = "--max-trials 2 --slot-memory 400MiB --metric throughput".split()
QUICK += "--start-profile-step 2 --end-profile-step 3 --max-profile-steps 2".split()
QUICK += ["--memory-model", "formula"]


_FINDER = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


class Environment:
    """A fresh environment with a wheel and everything that is installed here but some packages.

    Packages are used from where they are, so that operators which DeepSpeed has compiled for them
    need not be compiled again.
    """

    def __init__(self, folder: Path, wheel: Path, *, without: Collection[str]) -> None:
        self._folder = folder
        self._cache = wheel.with_name("cache")  # what the one has asked DeepSpeed, the other knows
        venv.create(folder, with_pip=False)
        [packages] = folder.glob("lib/python*/site-packages")
        shared = [entry for entry in sys.path if entry.endswith("site-packages")]
        (packages / "shared.pth").write_text("\n".join(shared))
        (packages / "finder.pth").write_text("import finder_without")
        (packages / "finder_without.py").write_text(_FINDER.format(names=set(without)))
        (folder / "bin" / "ninja").symlink_to(Path(sys.executable).parent / "ninja")
        pip = "python -m pip install --no-deps --no-index --disable-pip-version-check".split()
        told = self.run(folder, *pip, "--ignore-installed", wheel)
        assert told.returncode == 0, told.stderr
        for name in without:
            assert self.run(folder, "python", "-c", f"import {name}").returncode == 1
        told = self.run(folder, "python", "-c", "import dsat; print(dsat.__file__)")
        assert told.stdout.startswith(str(packages)), told

    def run(self, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
        """Runs one of its programs to its end, in `folder`."""
        # Nothing of the environment that the tests run in.
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env["XDG_CACHE_HOME"] = str(self._cache)
        program, *args = map(str, words)
        return subprocess.run(
            [str(self._folder / "bin" / program), *args],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dsat, built from a copy of its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "dsat", source / "dsat", ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", built, source], check=True)
    [found] = built.iterdir()
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What `pip install dsat` alone brings along, as far as scripts could tell."""
    folder = tmp_path_factory.mktemp("bare")
    return Environment(folder, wheel, without=("determined", "transformers", "accelerate"))


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_asks_for_what_every_script_needs_and_no_more(wheel: Path) -> None:
    metadata = _metadata(wheel)
    assert metadata["Version"] == dsat.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist") or []
    always = {re.split(r"[^\w]", text)[0] for text in requirements if "extra ==" not in text}
    assert {"deepspeed", "torch"} <= always
    assert not {"accelerate", "determined", "transformers"} & always
    [extra] = [text for text in requirements if text.endswith('extra == "determined"')]
    assert extra.startswith("determined")


def test_a_plain_script_is_tuned_with_nothing_else_installed(
    bare: Environment, tmp_path: Path
) -> None:
    words = ["train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]
    told = bare.run(
        EXAMPLES / "plain", "dsat", "random", "--run-dir", tmp_path, *QUICK, "--", *words
    )
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "best_ds_config.json").is_file()


@pytest.mark.nightly
def test_a_plain_script_is_estimated_with_nothing_else_installed(
    bare: Environment, tmp_path: Path
) -> None:
    words = ["train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]
    options = ["--slot-memory", "24GiB", "--json"]
    told = bare.run(EXAMPLES / "plain", "dsat", "estimate", *options, "--", *words)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["model"]["num_params"] > 0


@pytest.mark.nightly
def test_a_trainer_script_is_tuned_without_determined(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", wheel, without=("determined",))
    words = (
        "python3 -m torch.distributed.run train.py --deepspeed ds_config.json --output_dir".split()
    )
    words += [str(tmp_path / "output"), "--per_device_train_batch_size", "4"]
    folder = EXAMPLES / "hf_trainer"
    told = environment.run(
        folder, "dsat", "random", "--run-dir", tmp_path / "run", *QUICK, "--", *words
    )
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "run" / "best_ds_config.json").is_file()


@pytest.mark.parametrize("example", ["core_api", "deepspeed_trial"])
def test_what_needs_determined_says_how_to_get_it(bare: Environment, example: str) -> None:
    told = bare.run(EXAMPLES / example, "dsat", "random", "deepspeed.yaml", ".")
    assert told.returncode == 2
    assert "pip install 'dsat[determined]'" in told.stderr
    assert told.stderr.count("\n") == 1, told.stderr


def test_a_cluster_needs_determined(bare: Environment) -> None:
    told = bare.run(
        PROGRAMS / "tiny", "dsat", "random", "deepspeed.yaml", ".", "--engine", "determined"
    )
    assert told.returncode == 2
    assert "pip install 'dsat[determined]'" in told.stderr
    assert told.stderr.count("\n") == 1, told.stderr
