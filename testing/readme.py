"""Parts of the README and the documentation made from the code, and examples that tests run.

`python -m testing.readme` writes the README's table of options anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dsat.inputs.estimate_settings import ESTIMATE, EstimateSettings
from dsat.inputs.look_settings import LOOK_SETTINGS
from dsat.inputs.option import Group, Option, options_of
from dsat.inputs.settings import Settings
from dsat.search import SEARCHES
from dsat.space.knobs import KNOB_NAMES

PATH = Path(__file__).parent.parent / "README.md"
DOCS = PATH.parent / "docs"
_TABLE = re.compile(
    r"(?<=<!-- options: written by `python -m testing.readme` -->\n).*?(?=<!-- end)", re.S
)


def option_table() -> str:
    """The options of the first hour, as they are declared."""
    return _table(own for own in options_of(Settings) if own.group is Group.FIRST)


def with_table(text: str) -> str:
    """The README with the table that it should have."""
    found, count = _TABLE.subn(lambda _: option_table(), text)
    assert count == 1, "the README has lost the marks around its table of options"
    return found


def option_reference() -> str:
    """All options of all commands."""
    parts = ["## Of every search\n"]
    for group in Group:
        own = [each for each in options_of(Settings) if each.group is group]
        if own:
            parts.append(f"### {group.value.capitalize()}\n\n{_table(own)}")
    parts.append("## Of a single method\n")
    for method, search in SEARCHES.items():
        parts.append(f"### `{method}`\n\n{_table(search.options.values())}")
    commands = {ESTIMATE: EstimateSettings, **LOOK_SETTINGS}
    for name, settings in commands.items():
        parts.append(f"## Of `dsat {name}`\n\n{_table(options_of(settings))}")
    knobs = "\n".join(f"- `{name}`" for name in KNOB_NAMES)
    return "\n".join([*parts, f"## Settings that `--tune` and `--fix` know\n\n{knobs}\n"])


def python_examples() -> list[str]:
    """The blocks of Python in the page on Python, in their order."""
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M)


def _table(options: Iterable[Option]) -> str:
    return "\n".join(["| option | default | |", "|---|---|---|", *map(_row, options)]) + "\n"


def _row(own: Option) -> str:
    *short, long = own.flags
    flags = ", ".join(f"`{flag}`" for flag in [*short, f"{long} {own.metavar or ''}".strip()])
    default = "" if own.default in (None, False, ()) else f"`{own.default}`"
    said = own.help.replace("%%", "%").replace(": {knobs}", "")
    said = said.replace("{knobs}", "the settings below").replace("|", "\\|")
    if own.choices is not None and len(own.choices) > len(own.flags):
        said += ": " + ", ".join(f"`{value}`" for value in own.choices)
    return f"| {flags} | {default} | {said} |"


if __name__ == "__main__":
    PATH.write_text(with_table(PATH.read_text(encoding="utf-8")), encoding="utf-8")
