"""What the README repeats from the code, and the examples in it, which tests run.

`python -m testing.readme` writes the table of options anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from dsat.inputs.option import Option, options_of
from dsat.inputs.settings import Settings

PATH = Path(__file__).parent.parent / "README.md"
_TABLE = re.compile(
    r"(?<=<!-- options: written by `python -m testing.readme` -->\n).*?(?=<!-- end)", re.S
)


def option_table() -> str:
    """The options that matter most, as they are declared."""
    rows = [_row(own) for own in options_of(Settings) if own.notable]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows]) + "\n"


def with_table(text: str) -> str:
    """The README with the table that it should have."""
    found, count = _TABLE.subn(option_table(), text)
    assert count == 1, "the README has lost the marks around its table of options"
    return found


def python_examples() -> list[str]:
    """The blocks of Python in the section on Python, in their order."""
    section = PATH.read_text(encoding="utf-8").split("\n## From Python\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)


def _row(own: Option) -> str:
    *short, long = own.flags
    flags = ", ".join(f"`{flag}`" for flag in [*short, f"{long} {own.metavar or ''}".strip()])
    default = "" if own.default in (None, False, ()) else f"`{own.default}`"
    said = own.help.replace("%%", "%").replace(": {knobs}", "")
    if own.choices is not None and len(own.choices) > len(own.flags) and own.default is not None:
        said += ": " + ", ".join(f"`{value}`" for value in own.choices)
    return f"| {flags} | {default} | {said} |"


if __name__ == "__main__":
    PATH.write_text(with_table(PATH.read_text(encoding="utf-8")), encoding="utf-8")
