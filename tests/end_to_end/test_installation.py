"""dsat as pip installs it, in an environment without packages that only some scripts need."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Collection
from email.message import Message
from pathlib import Path

import pytest

import dsat
from dsat.values.outcome import OutcomeKind
from testing.command import run_of
from testing.local import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = ROOT / "testing" / "programs"
QUICK = "--max-trials 2 --slot-memory 400MiB --metric throughput".split()
QUICK += "--start-profile-step 2 --end-profile-step 3 --max-profile-steps 2".split()
QUICK += ["--memory-model", "formula", "--finals", "0"]


_FINDER = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            return None
        return super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context):
        if context.name in {names!r}:
            return []
        return super().find_distributions(context)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
_CHECK = """
import importlib.util, sys, dsat
assert not any(map(importlib.util.find_spec, sys.argv[1:]))
print(dsat.__file__)
"""


class Environment:
    """A new environment with the wheel, and with all packages installed here except some.

    The packages stay in their place, so that DeepSpeed's compiled operators need not be compiled
    again.
    """

    def __init__(self, folder: Path, wheel: Path, *, without: Collection[str]) -> None:
        self._folder = folder
        self._cache = wheel.with_name("cache")  # environments share DeepSpeed's answers
        venv.create(folder, with_pip=False)
        [packages] = folder.glob("lib/python*/site-packages")
        shared = [entry for entry in sys.path if entry.endswith("site-packages")]
        (packages / "shared.pth").write_text("\n".join(shared))
        if importlib.util.find_spec("_distutils_hack") is not None:  # setuptools' own file
            (packages / "then.pth").write_text("import _distutils_hack; _distutils_hack.add_shim()")
        (packages / "finder.pth").write_text("import finder_without")
        (packages / "finder_without.py").write_text(_FINDER.format(names=set(without)))
        (folder / "bin" / "ninja").symlink_to(Path(sys.executable).parent / "ninja")
        pip = "python -m pip install --no-deps --no-index --disable-pip-version-check".split()
        told = self.run(folder, *pip, "--ignore-installed", wheel)
        assert told.returncode == 0, told.stderr
        told = self.run(folder, "python", "-c", _CHECK, *without)
        assert told.stdout.startswith(str(packages)), told

    def run(self, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end, in `folder`."""
        # Excludes the environment of the tests.
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env["XDG_CACHE_HOME"] = str(self._cache)
        program, *args = map(str, words)
        return subprocess.run(
            [str(self._folder / "bin" / program), *args],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


def copy_sources(folder: Path) -> None:
    """Copy the sources of a distribution, with tests and benchmarks in the same folder."""
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("dsat", "tests/show", "benchmarks/peers"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "tests" / "test_layers.py", folder / "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of dsat from a copy of its sources."""
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    built = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", built, source], check=True)
    [found] = built.iterdir()
    return found


BARE = ("determined", "transformers", "accelerate")


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Make an environment with only the packages of an installation without extras."""
    folder = tmp_path_factory.mktemp("bare")
    return Environment(folder, wheel, without=BARE)


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_asks_for_what_no_one_has_already(wheel: Path) -> None:
    metadata = _metadata(wheel)
    assert metadata["Version"] == dsat.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist") or []
    always = {re.split(r"[^\w.-]", text)[0] for text in requirements if "extra ==" not in text}
    assert {"numpy", "rich", "wrapt"} <= always
    assert not {"accelerate", "deepspeed", "determined", "torch", "transformers"} & always
    for name, extra in (("determined", "determined"), ("torch", "deepspeed")):
        [found] = [text for text in requirements if re.match(rf"{name}[^\w]", text)]
        assert found.endswith(f'extra == "{extra}"')


def test_distributions_hold_the_package_and_its_data_alone(wheel: Path, tmp_path: Path) -> None:
    copy_sources(tmp_path)
    code = "from setuptools import build_meta; build_meta.build_sdist('out')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    [archive] = (tmp_path / "out").glob("deepspeed_autotune-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames() if "/" in name]
    with zipfile.ZipFile(wheel) as zipped:
        in_wheel = zipped.namelist()
    data = ["dsat/py.typed", "dsat/show/templates/body.html", "dsat/cli/main.py"]
    others = (path for path in ROOT.glob("dsat/**/*.*") if path.suffix not in (".py", ".pyc"))
    data += [str(path.relative_to(ROOT)) for path in others]
    for found in (names, in_wheel):
        assert set(data) <= set(found)
        assert not [name for name in found if name.split("/")[0] in ("tests", "benchmarks")]
    folders = {name.split("/")[0] for name in in_wheel}
    assert folders == {"dsat", f"deepspeed_autotune-{dsat.__version__}.dist-info"}


def test_predictions_name_the_packages_that_they_need(wheel: Path, tmp_path: Path) -> None:
    without = ("accelerate", "deepspeed", "determined", "torch", "transformers")
    bare = Environment(tmp_path / "environment", wheel, without=without)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    script = ["--", "train.py", "--deepspeed", "--deepspeed_config", "ds_config.json"]
    model = ["--model", str(tmp_path / "config.json")]
    for command in (["estimate", *script], ["model", *script], ["estimate", *model]):
        told = bare.run(EXAMPLES / "plain", "dsat", *command)
        assert told.returncode == 2
        assert told.stderr.count("\n") == 1 and "torch is not installed" in told.stderr
        assert "'torch>=2.5' 'deepspeed>=0.15.4'" in told.stderr
    assert "transformers is not installed" in told.stderr


HF_ARGS = "--deepspeed ds_config.json --output_dir {} --per_device_train_batch_size 4"


def tuned_there(environment: Environment, example: str, folder: Path, script: str) -> None:
    words = ["random", "--run-dir", folder / "run", *QUICK, "--", *script.split()]
    told = environment.run(EXAMPLES / example, "dsat", *words)
    assert told.returncode == 0, told.stderr
    outcomes = run_of(folder / "run").outcomes
    assert [outcome.kind for outcome in outcomes.values()] == [OutcomeKind.OK] * 2
    assert (folder / "run" / "best_ds_config.json").is_file()


@pytest.mark.nightly
def test_a_script_is_tuned_with_nothing_else_installed(bare: Environment, tmp_path: Path) -> None:
    tuned_there(bare, "plain", tmp_path, "train.py --deepspeed --deepspeed_config ds_config.json")


@pytest.mark.nightly
def test_a_trainer_is_tuned_without_determined(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", wheel, without=("determined",))
    script = f"python3 -m torch.distributed.run train.py {HF_ARGS.format(tmp_path / 'output')}"
    tuned_there(environment, "hf_trainer", tmp_path, script)


@pytest.mark.parametrize(
    ("folder", "options"),
    [
        (EXAMPLES / "core_api", []),
        (EXAMPLES / "deepspeed_trial", []),
        (PROGRAMS / "tiny", ["--engine", "determined"]),
    ],
)
def test_what_needs_determined_says_how_to_get_it(
    bare: Environment, folder: Path, options: list[str]
) -> None:
    told = bare.run(folder, "dsat", "random", "deepspeed.yaml", ".", *options)
    assert told.returncode == 2
    assert "pip install 'determined>=0.28,<0.38'" in told.stderr
    assert told.stderr.count("\n") == 1, told.stderr
