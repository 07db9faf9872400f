"""Pages of the documentation made from the code, and examples that tests run.

`python -m testing.reference` writes the references into their pages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from dsat.cli.parser import PREDICTS, options_of_command
from dsat.in_trial.adapters.calls import Adapter
from dsat.in_trial.adapters.table import ENGINE, MODELS, TABLE
from dsat.in_trial.adapters.trial import (
    ALWAYS,
    IN_LOCAL_PROCESSES,
    IN_LOCAL_TRIALS,
    IN_TRIALS,
    Phase,
)
from dsat.options import Group, Option
from dsat.search import SEARCHES
from dsat.show.settings import READ_ONLY
from dsat.space.deepspeed_settings import SETTING_NAMES, SETTINGS, never
from dsat.tuning.make_settings import all_options
from dsat.tuning.settings import TUNE
from dsat.values import hazards
from testing import python_reference

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- From the declarations in the code, by `make docs`. -->\n\n"


def option_reference() -> str:
    """Return the reference of all options of all commands."""
    parts = ["## Every search\n"]
    declared = [each for each in all_options() if each.group is not Group.METHOD]
    for group in Group:
        own = [each for each in declared if each.group is group]
        if own:
            parts.append(f"### {group.value[0].upper()}{group.value[1:]}\n\n{_table(own)}")
    parts.append("## One method\n")
    for method, search in SEARCHES.items():
        parts.append(f"### `{method}`\n\n{_table(search.options.values())}")
    named = {f"dsat {name}": name for name in (*PREDICTS, *READ_ONLY)}
    for title, name in {"dsat tune`, `dsat run": TUNE, **named}.items():
        parts.append(f"## `{title}`\n\n{_table(options_of_command(name))}")
    return "\n".join(parts)


def setting_reference() -> str:
    """Return the table of all settings that a search may choose."""
    rows = ["| setting | stages | values | why | searched |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        stages = ", ".join(map(str, setting.stages))
        values = ", ".join(f"`{_json(value)}`" for value in setting.values)
        when = "`--search`" if setting.unasked is never else "yes"
        rows.append(f"| `{setting.key}` | {stages} | {values} | {setting.reason} | {when} |")
    keys = {setting.key for setting in SETTINGS}
    others = ", ".join(f"`{name}`" for name in SETTING_NAMES if name not in keys)
    return "\n".join([*rows, "", f"`--search` and `--keep` also accept {others}.", ""])


def _json(value: Any) -> str:
    is_large = isinstance(value, int) and value >= 10_000
    return f"{value:g}".replace("e+0", "e").replace("e+", "e") if is_large else json.dumps(value)


def adapter_reference(table: Iterable[Adapter]) -> str:
    """Return the tables of functions that dsat wraps, one for each library."""
    parts = []
    by_package = sorted(table, key=_package)
    for package, adapters in groupby(by_package, key=_package):
        parts.append(f"## {package}\n\n| function | in | what dsat changes |\n|---|---|---|")
        for (text, when), alike in groupby(adapters, key=lambda a: (_description(a), _phases(a))):
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


_WHEN: Mapping[tuple[Phase, ...], str] = {
    ALWAYS: "trials, full-length runs",
    IN_TRIALS: "trials",
    IN_LOCAL_TRIALS: "local trials",
    IN_LOCAL_PROCESSES: "local trials and processes that they start",
}


def _phases(adapter: Adapter) -> str:
    return _WHEN[adapter.phases]


def python_examples() -> list[str]:
    """Return the Python code blocks of the page on Python, in order."""
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)


def _table(options: Iterable[Option]) -> str:
    return "\n".join(["| option | default | |", "|---|---|---|", *map(_row, options)]) + "\n"


def _row(own: Option) -> str:
    *short, long = own.flags
    words = [*short, f"{'' if own.is_argument else long} {own.placeholder or ''}".strip()]
    flags = ", ".join(f"`{word}`" for word in words).replace("|", "\\|")
    default = f"`{own.default}`" if own.has_plain_default else ""
    said = own.help.replace("%%", "%").replace(": {settings}", "")
    said = said.replace("{settings}", "[settings](settings.md)").replace("|", "\\|")
    if own.choices is not None and len(own.choices) > len(own.flags):
        said += ": " + ", ".join(f"`{value}`" for value in own.choices)
    return f"| {flags} | {default} | {said} |"


def fault_reference() -> str:
    """Return the table of DeepSpeed's known faults."""
    heads = "DeepSpeed", "condition", "effect", "without it", "source", "seen here"
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for each in hazards.table():
        links = [f"[{s}](https://github.com/{s.replace('#', '/issues/')})" for s in each.sources]
        what = each.versions, each.condition, each.effect, each.good
        lines.append(f"| {' | '.join([*what, ', '.join(links), each.checked])} |")
    return "\n".join(lines) + "\n"


def references() -> dict[Path, str]:
    """Return the generated text of each page, which goes below the page's `MARK`."""
    return {
        DOCS / "options.md": option_reference(),
        DOCS / "settings.md": setting_reference(),
        DOCS / "python-api.md": python_reference.python_reference(),
        DOCS / "faults.md": fault_reference(),
        DOCS / "what-dsat-touches.md": adapter_reference([*TABLE, *ENGINE, MODELS]),
    }


if __name__ == "__main__":
    for page, made in references().items():
        above, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
        page.write_text(above + mark + made, encoding="utf-8")
