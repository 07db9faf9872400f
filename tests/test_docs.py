"""What the documents say about the repository is true, and their commands work."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from dsat.cli import parser
from dsat.cli.main import main
from testing import shown
from testing.made_up_runs import write_run
from testing.world import World

ROOT = Path(__file__).parents[1]
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "examples/README.md", *PAGES)
_TOP = ("benchmarks", "docs", "dsat", "examples", "testing", "tests")
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def _named_paths(text: str) -> set[str]:
    """Return words in code spans that look like paths from the root of the repository."""
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
    assert named | linked or document in PAGES
    assert [str(each) for each in sorted(named | linked) if not each.exists()] == []


def test_every_file_of_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text)) - _named_paths(text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "dsat" / name).exists()] == []


def test_every_example_has_a_line() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    tracked = subprocess.run(
        ["git", "ls-files", "examples"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = {line.split("/")[1] for line in tracked.stdout.split() if line.count("/") > 1}
    assert folders
    assert folders == {name for name in folders if f"| [{name}]({name}/" in text}


# -- messages


def _texts() -> list[str]:
    """Return all strings in the code in lower case, with a mark for each inserted value."""
    found = []
    for path in (ROOT / "dsat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.lower())
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
                found.append("".join(map(str, parts)).lower())
    return found


@pytest.mark.slow  # all of the code is read
def test_every_message_that_is_explained_exists() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    of_dsat = page.partition("## Messages of dsat")[2].partition("\n## ")[0]
    titles = re.findall(r"^### (.*)$", of_dsat, re.M)
    texts = _texts()
    assert len(titles) > 20
    for title in titles:
        parts = [part.strip() for part in title.lower().split("...")]
        assert any(all(part in text for part in parts) for text in texts), title


# -- commands


def _commands(document: str) -> list[list[str]]:
    """Return the arguments of every `dsat` command in a document, without comments."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```(?:console|sh)?\n(.*?)^```$", text, re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.match(r"(?:\$ )?(?:python3 -m )?dsat (.*)", line)
            if command is not None:
                found.append(shlex.split(command[1], comments=True))
    spans = re.findall(r"\| `dsat ([^`-][^`]*)` \|", text)
    return found + [shlex.split(span) for span in spans]


# Those of CONTRIBUTING.md are run by tests/test_contributing.py.
COMMANDS = [
    (doc, words) for doc in DOCUMENTS if doc != "CONTRIBUTING.md" for words in _commands(doc)
]


@pytest.mark.parametrize(
    ("document", "words"), COMMANDS, ids=[f"{doc}: {' '.join(words)}" for doc, words in COMMANDS]
)
def test_a_command_that_is_told_means_something(document: str, words: list[str]) -> None:
    parser.parse(words)


def test_the_commands_that_look_at_runs_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my-model-3", "my-model-4"):
        run = write_run(tmp_path / "dsat_runs" / name, World(), trials=20)
    trial = next(t.name for t in run.trials.values() if t.kind.value == "search")
    looked = [w for _, w in COMMANDS if w[0] in ("show", "runs", "compare", "export")]
    assert {words[0] for words in looked} >= {"show", "runs", "compare"}
    for words in looked:
        known = [trial if word.startswith("z2_") else word for word in words]
        assert main(known) == 0, words
        assert capsys.readouterr().out


OUTPUTS = dict.fromkeys(
    block for path in shown.DOCUMENTS for block in shown.blocks(path.read_text(encoding="utf-8"))
)


def _marks(block: shown.Block) -> list[pytest.MarkDecorator]:
    return [] if block.looks else [pytest.mark.nightly]


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=_marks(block)) for block in OUTPUTS],
    ids=[block.commands[-1][:40] for block in OUTPUTS],
)
def test_an_output_is_what_the_command_prints(block: shown.Block) -> None:
    assert block.printed() == list(block.shown), "run `python -m testing.shown`"


@pytest.mark.slow
def test_the_first_dry_run_of_the_quick_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [words] = [w for w in _commands("docs/quick-start.md") if "--dry-run" in w]
    monkeypatch.chdir(ROOT / "examples" / "plain")
    assert main(words) == 0
    assert "at most 50 trials" in capsys.readouterr().out
