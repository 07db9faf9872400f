"""Imports in a container: Determined, numpy, ruamel.yaml, torch and deepspeed only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.test_layers import ROOT, _import_graph, _sources

GIVEN = {"determined", "numpy", "ruamel", "torch", "deepspeed", "dsat"}
# psutil, of the host's memory where there are no accelerators: deepspeed's CPU accelerator and
# determined's own start-up have imported it before.
# hjson, where a DeepSpeed configuration is read: deepspeed itself reads it with that.
# threadpoolctl, where it is there: so that a search takes no cores from trials.
BY_NEED = {
    ("in_trial.profiler", "psutil"),
    ("inputs.ds_config", "hjson"),
    ("search.threads", "threadpoolctl"),
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
    """Yield the third-party imports of a source, those in functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


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


def test_the_search_of_the_runner_needs_neither_torch_nor_deepspeed(tmp_path: Path) -> None:
    """The image of a 0-slot container may be a small one."""
    blocker = (
        "import importlib.abc, sys\n"
        "class Blocker(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {blocked}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import dsat, dsat.in_trial.cluster_rank, dsat.determined_cluster.search\n"
    )
    blocked = {"torch", "deepspeed", "transformers", "rich", "wrapt", "psutil", "hjson"}
    code = blocker.replace("{blocked}", repr({*blocked, "threadpoolctl"}))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    # determined itself needs psutil and torch for parts that the runner does not use.
    code = blocker.replace("{blocked}", repr({"deepspeed", "transformers", "rich", "wrapt"}))
    code += "import dsat.determined_cluster.runner\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
