"""Tests that depend on torch and DeepSpeed, run with other versions of them.

    python3 -m testing.compat [--keep] [PAIR ...]

Each pair gets a fresh environment of its own, which is deleted afterwards: with the libraries that
torch brings along it takes about 6 GB. Prints a row for the table of `CONTRIBUTING.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "compat"
TESTS = (
    "tests/in_trial",
    "tests/memory/test_simulation_client.py",
    "tests/engines/local",
    "tests/end_to_end",
)
HEAD = ("date", "python", "torch", "deepspeed", "transformers", "passed", "failed", "skipped")


@dataclass(frozen=True)
class Pair:
    """Versions that are installed together.

    Attributes:
        torch, deepspeed: the pair; without a version the newest that pip finds.
        others: what was of their time, as requirements.
    """

    torch: str
    deepspeed: str
    others: tuple[str, ...] = ()

    @property
    def requirements(self) -> list[str]:
        return [f"torch{self.torch}", f"deepspeed{self.deepspeed}", *self.others]


PAIRS: Mapping[str, Pair] = {
    "oldest": Pair(
        "==2.5.1",
        "==0.15.4",
        ("accelerate==1.1.1", "torchvision==0.20.1", "transformers==4.46.3"),
    ),
    "older": Pair(
        "==2.7.1",
        "==0.17.6",
        ("accelerate==1.8.1", "torchvision==0.22.1", "transformers==4.53.3"),
    ),
    "between": Pair("==2.11.0", "==0.19.8"),
    "newest": Pair("", ""),
}


def check(name: str, *, keep: bool) -> dict[str, str]:
    """Installs a pair and runs the tests with it.

    Args:
        name: of `PAIRS`.
        keep: leave the environment for another look.

    Returns:
        A row of the table, by `HEAD`.
    """
    folder = FOLDER / name
    python = install(PAIRS[name], folder)
    report = folder / "tests.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        # Operators are compiled for one version of torch.
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
    }
    subprocess.run(
        [
            *(python, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}"),
            *("-o", "filterwarnings=default"),  # libraries of another time warn of one another
            *TESTS,
        ],
        cwd=ROOT,
        env=environment,
        check=False,  # the report tells
    )
    row = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        **_versions(python),
        **_counts(report),
    }
    if not keep:
        shutil.rmtree(folder)
    return row


def install(pair: Pair, folder: Path) -> Path:
    """A fresh environment with dsat, its extras and a pair of versions.

    Returns:
        Its interpreter.
    """
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # DeepSpeed is built at its installation, and looks for torch.
    subprocess.run([*pip, "--no-cache-dir", *pair.requirements], check=True)
    subprocess.run([*pip, *pair.requirements, *_others(), "pytest", "pytest-xdist"], check=True)
    # A pair that is not claimed yet is tried as well.
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True)
    return python


def _others() -> list[str]:
    """Return the requirements of dsat and of the tests' extras, other than the pair."""
    found = []
    for text in requires("dsat") or ():
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
    names = ["torch", "deepspeed", "transformers"]
    code = "import json, sys; from importlib.metadata import version; "
    code += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    found = subprocess.run([python, "-c", code, *names], capture_output=True, check=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def _counts(report: Path) -> dict[str, str]:
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    ran, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {
        "passed": str(ran - skipped - failed),
        "failed": str(failed),
        "skipped": str(skipped),
    }


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """The pairs that the command line names, or all; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"of {', '.join(PAIRS)}")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    given = parser.parse_args()
    if unknown := set(given.pairs) - PAIRS.keys():
        parser.error(f"no pair {', '.join(sorted(unknown))}; there are {', '.join(PAIRS)}")
    rows = []
    for name in given.pairs or PAIRS:
        began = time.monotonic()
        rows.append(check(name, keep=given.keep))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(_line(list(HEAD)), _line(["---"] * len(HEAD)), sep="\n")
    print(*(_line([row[key] for key in HEAD]) for row in rows), sep="\n")
    return int(any(row["failed"] != "0" or row["passed"] == "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
