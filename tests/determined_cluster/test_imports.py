"""Imports in a container: only Determined, numpy, ruamel.yaml, torch and deepspeed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsat.determined_cluster import upload
from tests.test_layers import _import_graph, _sources

# wrapt is uploaded with dsat.
GIVEN = {"determined", "numpy", "ruamel", "torch", "deepspeed", "dsat", "wrapt"}
# psutil, for host memory without an accelerator: deepspeed's CPU accelerator and determined's own
# start-up import it first.
# hjson, to read a DeepSpeed configuration: deepspeed itself uses it.
# packaging, for versions of DeepSpeed: determined requires it.
# threadpoolctl, if it is installed, so that a search uses no cores of trials.
# Further libraries, if the script has imported them.
BY_NEED = {
    ("in_trial.profiler", "psutil"),
    ("command.ds_config", "hjson"),
    ("search.threads", "threadpoolctl"),
    ("values.hazards", "packaging"),
    ("in_trial.loopback", "psutil"),
    ("in_trial.script_switches", "liger_kernel"),
    ("simulation.versions.transformers_models", "transformers"),
}
IN_A_CONTAINER = ("determined_cluster.runner", "in_trial.cluster_rank", "")


def _reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    found, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph.get(name, ())
    return found


def _third_party(text: str) -> Iterator[str]:
    """Yield the third-party imports of a source file, including those in functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.slow
def test_nothing_else_is_imported() -> None:
    sources = _sources()
    graph = _import_graph(sources)
    found = {
        (name, imported)
        for name in set[str]().union(*(_reachable(module, graph) for module in IN_A_CONTAINER))
        for imported in _third_party(sources[name])
        if imported not in GIVEN | set(sys.stdlib_module_names)
    }
    assert found <= BY_NEED


# Blocks some packages, and finds wrapt only next to dsat.
BLOCKER = """
import importlib.machinery, sys, warnings
Paths = importlib.machinery.PathFinder
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name)
        if name == "wrapt":
            path = [path for path in sys.path if "spare" in path]
        return Paths.find_spec(name, path, target)
sys.meta_path[:] = [*sys.meta_path[:sys.meta_path.index(Paths)], Blocker()]
warnings.simplefilter("ignore")
import dsat
assert {place!r} in dsat.__file__
"""


@pytest.mark.slow
def test_the_search_of_the_runner_needs_neither_torch_nor_deepspeed(tmp_path: Path) -> None:
    """The image of a 0-slot container may be a small one without them."""
    upload.lay_out({}, "{}", tmp_path)

    def imports(names: str, *blocked: str) -> None:
        code = BLOCKER.replace("{blocked}", repr(set(blocked)))
        code = code.replace("{place!r}", repr(str(tmp_path)))
        subprocess.run([sys.executable, "-c", f"{code}import {names}"], check=True, cwd=tmp_path)

    others = ("torch", "psutil", "hjson", "threadpoolctl")
    least = ("deepspeed", "transformers", "rich")
    imports("dsat.in_trial.cluster_rank, dsat.determined_cluster.search", *least, *others)
    # determined itself needs psutil and torch for parts that the runner does not use.
    imports("dsat.determined_cluster.runner", *least)
