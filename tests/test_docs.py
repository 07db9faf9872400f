"""What the contributors' documents say of the repository is so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("CONTRIBUTING.md", "examples/README.md", "docs/architecture.md")
_TOP = ("benchmarks", "docs", "dsat", "examples", "testing", "tests")
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def _named_paths(text: str) -> set[str]:
    """What looks like a path from the root of the repository, in code spans."""
    return {
        word.rstrip(":,")
        for span in _CODE.findall(text)
        for word in span.split()
        if word.startswith(tuple(f"{top}/" for top in _TOP))
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_is_named_exists(document: str) -> None:
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    named = {ROOT / name for name in _named_paths(text)}
    linked = {path.parent / name for name in _LINK.findall(text)}
    assert named | linked
    assert [str(each) for each in sorted(named | linked) if not each.exists()] == []


def test_paths_are_found_in_code_and_links() -> None:
    text = "`dsat/a.py`, `testing/b.py: c` and `make x` in [d](docs/d.md#e), not [f](https://g/h)"
    assert _named_paths(text) == {"dsat/a.py", "testing/b.py"}
    assert _LINK.findall(text) == ["docs/d.md"]


def test_every_example_has_a_line() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    tracked = subprocess.run(
        ["git", "ls-files", "examples"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = {line.split("/")[1] for line in tracked.stdout.split() if line.count("/") > 1}
    assert folders
    assert folders == {name for name in folders if f"| [{name}]({name}/" in text}
