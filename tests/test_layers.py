"""Imports point downward only: which folder of `dsat` may import which others."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The folders and modules directly in `dsat`, lowest first. Each may import only itself and the
# entries above it in this list. Two packages in one entry may import each other. "" is `dsat`
# itself, which imports the entries below it lazily.
FLOORS = (
    "errors",
    "values",
    "command",
    "options",
    "space",
    "memory",
    "search",
    "in_trial simulation",  # a rank serves simulations, which use the parts of a rank
    "",
    "engines",
    "run",
    "prepare",
    "show",
    "tuning estimating projecting",
    "determined_cluster",
    "doctor",
    "api_options",
    "api",
    "cli",
    "__main__",
)


@functools.cache
def _sources() -> dict[str, str]:
    """Return the text of every module, by its name relative to `dsat`."""
    package, sources = ROOT / "dsat", {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def _floor(module: str) -> int | None:
    top = module.split(".")[0]
    floors = (i for i, names in enumerate(FLOORS) if top in (names.split() or [""]))
    return next(floors, None)


def _imports(module: str, text: str, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules of `dsat` that a source file imports, also within functions."""
    tree = ast.parse(text)
    if not module:  # its lazy imports are repeated for type checkers only
        tree.body = [node for node in tree.body if not _is_for_type_checkers(node)]
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):  # ruff allows no relative ones
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, inner = name.partition(".")
            if package == "dsat":
                yield inner if inner in modules else inner.rpartition(".")[0]


def _is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    return {name: set(_imports(name, text, sources.keys())) for name, text in sources.items()}


@functools.cache
def _graph() -> dict[str, set[str]]:
    return _import_graph(_sources())


def _violations(graph: Mapping[str, set[str]]) -> list[str]:
    found = []
    for module, imported in graph.items():
        floor = _floor(module)
        if floor is None:
            found.append(f"dsat.{module} has no place in FLOORS")
            continue
        for other in sorted(imported):
            above = _floor(other)
            if above is None or above > floor:
                found.append(f"dsat.{module} imports dsat.{other}")
    return found


def test_imports_run_downward_only() -> None:
    assert _violations(_graph()) == []


def test_no_command_uses_another() -> None:
    slices = ("tuning", "estimating", "projecting")
    for module, imported in _graph().items():
        top = module.split(".")[0]
        if top in slices:
            assert {other.split(".")[0] for other in imported} & {*slices} <= {top}, module


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = _graph()
    # A package's `__init__` imports from its modules, and importing a module imports the package.
    graphlib.TopologicalSorter(
        {name: below - {name.rpartition(".")[0]} for name, below in graph.items()}
    ).prepare()


def test_few_things_stand_at_the_top() -> None:
    code = {
        path.name
        for folder in (ROOT, ROOT / "dsat")
        for path in folder.iterdir()
        if path.suffix == ".py" or any(path.glob("*.py"))
    }
    assert len(code) <= 30, sorted(code)


def test_searches_and_engines_know_nothing_of_each_other() -> None:
    graph = _graph()

    def reachable(top: str) -> set[str]:
        found = {name for name in graph if name.split(".")[0] == top}
        while more := {other for name in found for other in graph.get(name, ())} - found:
            found |= more
        return {name.split(".")[0] for name in found}

    assert {"search", "space", "values"} <= reachable("search")
    assert not {"engines", "run", "cli"} & reachable("search")
    assert "values" in reachable("engines")
    assert not {"search", "run", "cli"} & reachable("engines")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("dsat", "torch deepspeed determined transformers ray rich numpy"),
        ("dsat.in_trial.meter", "torch deepspeed determined ray rich numpy"),
        ("dsat.run.tuner", "torch deepspeed determined ray rich"),
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


# -- sizes

MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS, MOST_METHODS, MOST_ATTRIBUTES = 400, 60, 7, 20, 15
# Exceptions that are larger. An entry that is no longer too large must be removed.
TOO_LARGE = {
    "simulation.attention attention: parameters",
    "run.run Run: attributes",
    # Each attribute is a fact of the journal.
    "values.outcome Outcome: attributes",
    # Each attribute is a fact of the model.
    "values.outcome ModelProfile: attributes",
    # Each attribute is a part of the answer.
    "projecting.projection Projection: attributes",
    # Each attribute is an option.
    "tuning.settings Settings: attributes",
    "api_options TuneOptions: attributes",
}


def _too_large(module: str, text: str) -> Iterator[str]:
    """Yield what exceeds a limit in a source file, each as `module name: measure`."""
    if text.count("\n") > MOST_LINES:
        yield f"{module}: lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            if sum(isinstance(each, _FUNCTIONS) for each in node.body) > MOST_METHODS:
                yield f"{module} {node.name}: methods"
            if len(_attributes(node)) > MOST_ATTRIBUTES:
                yield f"{module} {node.name}: attributes"
        elif isinstance(node, _FUNCTIONS):
            if (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES:
                yield f"{module} {node.name}: lines"
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len([each for each in given if each.arg not in ("self", "cls")]) > MOST_PARAMETERS:
                yield f"{module} {node.name}: parameters"


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, and of attributes that its methods set on `self`."""
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return fields | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def test_nothing_is_too_large() -> None:
    found = {each for name, text in _sources().items() for each in _too_large(name, text)}
    assert found == TOO_LARGE
