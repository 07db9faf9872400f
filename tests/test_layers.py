"""Imports run downward only: which room of the house may use which others."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERYTHING = "*"

# Names are relative to `dsat`, which itself is "". A name that ends in ".*" stands for a package
# and all in it, whose modules may import each other.
MAY_IMPORT = {
    "errors": "",
    "trial": "",
    "arguments": "ds_config errors",
    "ds_config": "errors trial",
    "choices": "ds_config errors",
    "autotuning": "arguments choices ds_config errors",
    "experiment": "choices ds_config errors trial",
    "strategy": "",
    "overrides": "arguments strategy trial",
    "space": "ds_config overrides strategy trial",
    "plan": "ds_config space trial",
    "memory.*": "ds_config errors injection journal strategy trial",
    "ladder": "ds_config memory.* plan space strategy trial",
    "gaussian": "",
    "speed": "gaussian strategy",
    "search.*": "arguments errors gaussian memory.* overrides space speed strategy trial",
    "forecast": "ds_config memory.* overrides plan space trial",
    "journal": "errors trial",
    "run": "journal memory.* plan trial",
    "tuner": (
        "ds_config errors forecast journal ladder memory.* overrides plan run search.* space "
        "strategy trial"
    ),
    "survey": "memory.* plan strategy trial",
    "failures": "errors trial",
    "gauges": "trial",
    "injection": "ds_config errors",
    "profiler": "trial",
    "checks": "errors",
    "meter": "checks errors gauges profiler trial",
    "hf": "",
    "task": "ds_config failures meter trial",
    "script_api": "arguments ds_config errors journal meter task",
    "": "errors script_api",
    "engines": "errors trial",
    "engines.remembered": "ds_config engines plan run trial",
    "engines.simulated": "engines errors trial",
    "engines.local.*": (
        "arguments ds_config engines errors experiment failures gauges hf injection journal "
        "memory.* meter trial"
    ),
    "engines.determined": "",
    "engines.determined.verdict": "failures task trial",
    "engines.determined.engine": (
        "ds_config engines.determined.verdict errors experiment meter task trial"
    ),
    "engines.determined.patience": "",
    "engines.determined.where": "",
    "engines.determined.master": "ds_config engines.determined.patience task",
    "engines.determined.job": "ds_config engines.determined.engine experiment plan",
    "engines.determined.context": "engines.determined.job errors",
    "engines.determined.client": "engines.determined.job engines.determined.patience errors",
    # What follows are programs of the cluster, with an engine and a tuner in them.
    "engines.determined.search": (
        "engines.determined.engine journal plan report.* run trial tuner"
    ),
    "engines.determined.runner": (
        "engines.determined.engine engines.determined.job engines.determined.master "
        "engines.determined.patience engines.determined.search journal report.* run"
    ),
    "loop": "engines errors forecast memory.* run trial tuner",
    "report.*": "ds_config errors forecast journal ladder memory.* plan run trial",
    "live": "forecast report.* run trial",
    "options": "plan space trial",
    "settings": "options space",
    "prepare": EVERYTHING,
    "estimate": EVERYTHING,
    "folders": "autotuning errors journal plan prepare report.* run settings",
    "messages": "ladder live prepare report.* run trial tuner",
    "cluster": EVERYTHING,
    "cli": EVERYTHING,
    "__main__": "cli",
}


def _sources(package: Path) -> dict[str, str]:
    """The text of every module, by its name relative to `dsat`."""
    sources = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def _room(module: str) -> str | None:
    if module in MAY_IMPORT:
        return module
    packages = (room for room in MAY_IMPORT if room.endswith(".*"))
    return next((room for room in packages if f"{module}.".startswith(room[:-1])), None)


def _imports(module: str, is_package: bool, text: str, modules: set[str]) -> Iterator[str]:
    """The modules of `dsat` that a source imports anywhere, be it in a function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "dsat":
                    yield alias.name[len("dsat") :].lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parts = module.split(".") if module else []
                up = node.level - (1 if is_package else 0)
                above = parts[: len(parts) - up]
            elif (node.module or "").split(".")[0] == "dsat":
                above = []
            else:
                continue
            inner = (node.module or "").split(".")
            base = ".".join([*above, *inner[0 if node.level else 1 :]]).strip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                yield name if name in modules else base


def _import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    names = set(sources)
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    packages.add("")
    return {
        name: set(_imports(name, name in packages, text, names)) for name, text in sources.items()
    }


def _violations(sources: Mapping[str, str]) -> list[str]:
    found = []
    for module, imported in _import_graph(sources).items():
        room = _room(module)
        if room is None:
            found.append(f"dsat.{module} has no place in MAY_IMPORT")
            continue
        allowed = MAY_IMPORT[room].split()
        for other in sorted(imported):
            if EVERYTHING not in allowed and _room(other) not in [*allowed, room]:
                found.append(f"dsat.{module} imports dsat.{other}")
    return found


def test_imports_run_downward_only() -> None:
    assert _violations(_sources(ROOT / "dsat")) == []


def test_the_table_itself_has_no_way_back_up() -> None:
    graph = {room: set(below.split()) for room, below in MAY_IMPORT.items() if below != EVERYTHING}
    assert set().union(*graph.values()) <= set(MAY_IMPORT)
    graphlib.TopologicalSorter(graph).prepare()


def test_searches_and_engines_know_nothing_of_each_other() -> None:
    graph = _import_graph(_sources(ROOT / "dsat"))

    def reachable(top: str) -> set[str]:
        found = {name for name in graph if name.split(".")[0] == top}
        while more := {other for name in found for other in graph.get(name, ())} - found:
            found |= more
        return {name.split(".")[0] for name in found}

    assert {"search", "space", "trial"} <= reachable("search")
    assert not {"engines", "loop", "cli"} & reachable("search")
    for program in ("engines.determined.search", "engines.determined.runner"):
        del graph[program]
    assert "trial" in reachable("engines")
    assert not {"search", "tuner", "cli"} & reachable("engines")


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("trial", "import dsat.errors", ["dsat.trial imports dsat.errors"]),
        ("trial", "from dsat import errors", ["dsat.trial imports dsat.errors"]),
        ("trial", "from dsat.errors import DsatError", ["dsat.trial imports dsat.errors"]),
        ("trial", "from .errors import DsatError", ["dsat.trial imports dsat.errors"]),
        ("trial", "from . import errors", ["dsat.trial imports dsat.errors"]),
        ("trial", "def f():\n  from dsat import errors", ["dsat.trial imports dsat.errors"]),
        ("trial", "from dsat import __version__", ["dsat.trial imports dsat."]),
        ("trial", "import json, dsatellite.errors", []),
        ("search.asha", "from dsat.search.base import Search", []),
        ("search.asha", "from ..engines import Engine", ["dsat.search.asha imports dsat.engines"]),
        ("search.asha", "from . import base\nfrom ..trial import Trial", []),
        ("search", "from .base import Search\nfrom ..trial import Trial", []),
        ("search", "from ..tuner import Tuner", ["dsat.search imports dsat.tuner"]),
        ("engines.local.new", "import dsat.tuner", ["dsat.engines.local.new imports dsat.tuner"]),
        ("engines.new", "", ["dsat.engines.new has no place in MAY_IMPORT"]),
        ("new", "", ["dsat.new has no place in MAY_IMPORT"]),
        ("cli", "from dsat import engines, tuner", []),
    ],
)
def test_the_check_finds_what_it_should(module: str, text: str, found: list[str]) -> None:
    others = ("", "errors", "trial", "tuner", "engines", "search", "search.base", "search.asha")
    assert _violations({**dict.fromkeys(others, ""), module: text}) == found


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("dsat", "torch deepspeed determined transformers ray rich numpy"),
        ("dsat.meter", "torch deepspeed determined ray rich numpy"),
        ("dsat.tuner", "torch deepspeed determined ray rich"),
    ],
)
def test_importing_loads_nothing_heavy(module: str, heavy: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules = json.loads(loaded.stdout)
    assert module in modules
    assert {name.split(".")[0] for name in modules} & set(heavy.split()) == set()
