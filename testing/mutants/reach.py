"""Which tests reach which mutated lines, found by a recording copy of the product.

A statement before each mutated line writes down the running test: pytest names it in a variable
that all processes inherit, so forks and subprocesses are seen as well. A constant has no moment at
which it runs; the statements that read it are recorded in its place.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from testing.mutants.catalogue import Mutation

_RECORDER = """
import os

_seen = set()


def reach(number):
    try:
        key = number, os.environ.get("PYTEST_CURRENT_TEST", "")
        if key not in _seen:
            _seen.add(key)
            file = os.open({file!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{{number}}\\t{{key[1]}}\\n".encode())
            os.close(file)
    except Exception:
        pass  # no descriptor left, say: the test is of just that
"""
_CALL = '__import__("dsat.mutant_recorder", fromlist=["reach"]).reach({number})'
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def instrument(copy: Path, mutations: Sequence[Mutation], record: Path) -> None:
    """Make a copy of the repository record into a file which tests reach the mutated lines."""
    sources = {path: path.read_text(encoding="utf-8") for path in (copy / "dsat").rglob("*.py")}
    parsed = functools.cache(lambda path: _Module(sources[path]))
    calls: dict[Path, set[tuple[int, int]]] = defaultdict(set)
    for number, mutation in enumerate(mutations):
        path = copy / mutation.path
        module = parsed(path)
        statement = module.statement(mutation.line(sources[path]) + 1)
        if module.is_in_function(statement):
            calls[path].add((module.place(statement), number))
            continue
        names = _assigned(statement)
        for other, text in sources.items():
            if any(name in text for name in names):
                calls[other] |= {(place, number) for place in parsed(other).readers(names)}
    for path, found in calls.items():
        lines = sources[path].splitlines(keepends=True)
        for place, number in sorted(found, reverse=True):
            text = lines[place - 1]
            indent = text[: len(text) - len(text.lstrip())]
            lines.insert(place - 1, f"{indent}{_CALL.format(number=number)}\n")
        path.write_text("".join(lines), encoding="utf-8")
    recorder = _RECORDER.format(file=str(record))
    (copy / "dsat" / "mutant_recorder.py").write_text(recorder, encoding="utf-8")


def reached(
    record: Path, mutations: Sequence[Mutation], tests: Iterable[str]
) -> dict[str, list[str]]:
    """Return the tests that reach each mutation, by its id.

    What a test's set-up reaches may be a fixture that the other tests of its file use as well.
    """
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    found: dict[str, dict[str, None]] = {mutation.id: {} for mutation in mutations}
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
        number, _, running = line.partition("\t")
        test, _, phase = running.rpartition(" (")
        file = by_file.get(test.partition("::")[0], [])
        users = [test] if phase == "call)" else file
        found[mutations[int(number)].id] |= dict.fromkeys(name for name in users if name in file)
    return {name: list(tests) for name, tests in found.items()}


class _Module:
    """A parsed source."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self._parents: dict[ast.AST, ast.AST] = {}
        self._named: dict[str, list[ast.expr]] = defaultdict(list)
        for node in ast.walk(self._tree):
            self._parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
            if isinstance(node, (ast.Name, ast.Attribute)):
                self._named[node.id if isinstance(node, ast.Name) else node.attr].append(node)

    def statement(self, line: int) -> ast.stmt:
        """Return the innermost statement with a line; an `elif` is part of its `if`."""
        found = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.stmt)
            and _first_line(node) <= line <= (node.end_lineno or node.lineno)
        ]
        node = max(found, key=lambda each: (_first_line(each), -(each.end_lineno or 0)))
        while self._lines[node.lineno - 1].lstrip().startswith("elif "):
            parent = self._parents[node]
            assert isinstance(parent, ast.stmt)
            node = parent
        return node

    def is_in_function(self, node: ast.AST) -> bool:
        return isinstance(node, _Function) or any(
            isinstance(each, _Function) for each in self._ancestors(node)
        )

    def place(self, node: ast.stmt) -> int:
        """Return the line before which a call records that a statement is about to run."""
        if not isinstance(node, _Function):
            return _first_line(node)
        body = node.body
        return _first_line(body[1 if ast.get_docstring(node) and len(body) > 1 else 0])

    def readers(self, names: Iterable[str]) -> Iterator[int]:
        """Yield the places of statements in functions that read a constant, if only indirectly."""
        waiting, known = list(names), set(names)
        while waiting:
            for node in self._named[waiting.pop()]:
                statement = self.statement(node.lineno)
                if self.is_in_function(statement):
                    yield self.place(statement)
                else:
                    more = set(_assigned(statement)) - known
                    known |= more
                    waiting += more

    def _ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._parents:
            node = self._parents[node]
            yield node


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _assigned(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module or a class defines."""
    if isinstance(statement, ast.ClassDef):
        return [statement.name]
    targets: Iterable[ast.AST] = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [statement.target]
        if isinstance(statement, (ast.AnnAssign, ast.AugAssign))
        else []
    )
    nodes = (node for target in targets for node in ast.walk(target))
    return [node.id for node in nodes if isinstance(node, ast.Name)]


def in_order(
    tests: Sequence[str], folder: str, results: Mapping[str, tuple[float, bool]]
) -> list[str]:
    """Return tests that pass without a mutation: those of a folder first, fast files first."""
    passing = [test for test in tests if test in results and not results[test][1]]
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in passing:
        by_file[test.partition("::")[0]].append(test)

    def cost(file: str) -> tuple[bool, float]:
        seconds = sum(results[test][0] for test in by_file[file])
        return not file.startswith(f"{folder}/"), seconds / len(by_file[file])

    return [test for file in sorted(by_file, key=cost) for test in by_file[file]]
