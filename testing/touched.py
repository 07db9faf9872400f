"""The table of what dsat touches in a user's process, as a page of the documentation."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import groupby

from dsat.in_trial.adapters.calls import Adapter
from dsat.in_trial.adapters.trial import ALWAYS, IN_TRIALS


def markdown(table: Iterable[Adapter]) -> str:
    """Return the rows by library and by what is done, in their order."""
    parts = []
    by_package = sorted(table, key=_package)
    for package, adapters in groupby(by_package, key=_package):
        parts.append(f"## {package}\n\n| function | in | what dsat changes |\n|---|---|---|")
        for (text, when), alike in groupby(adapters, key=lambda a: (_description(a), _when(a))):
            names = ", ".join(_link(adapter) for adapter in alike)
            parts.append(f"| {names} | {when} | {text} |")
        parts.append("")
    return "\n".join(parts)


def _package(adapter: Adapter) -> str:
    package = adapter.module.partition(".")[0]
    return "Python" if package in _OF_PYTHON else package


_OF_PYTHON = ("argparse", "builtins", "io", "multiprocessing", "os", "shutil", "sys")


def _link(adapter: Adapter) -> str:
    versions = f" ({adapter.versions})" if adapter.versions else ""
    return f"`{adapter.module}.{adapter.attribute}`{versions}".replace("`builtins.", "`")


def _description(adapter: Adapter) -> str:
    text = inspect.getdoc(adapter.wrapper) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _when(adapter: Adapter) -> str:
    if adapter.phases == ALWAYS:
        return "trials, full-length runs"
    return "trials" if adapter.phases == IN_TRIALS else ", ".join(p.name for p in adapter.phases)
