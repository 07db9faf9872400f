"""The catalogue of messages about users' mistakes; `python -m testing.messages` rewrites it."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from dsat.prepare import installed_deepspeed, source
from testing.scenarios import User
from testing.started import Told
from testing.world import World
from tests.scenarios.errors import DS, Mistake, argv, mistakes

CATALOGUE = Path(__file__).parents[1] / "tests" / "scenarios" / "messages.txt"
_CHOICES = re.compile(r"\(choose from .*\)")  # Python 3.12 changed the quotes
_HEAD = """\
What dsat says about mistakes: what was typed, with which files, and the message.
`python -m testing.messages` writes this file anew from tests/scenarios/errors.py.
"""


def user_in(folder: Path, mistake: Mistake) -> User:
    """Return a user with two devices, and with the files of a mistake."""
    user = User(folder, World(slots=2))
    user.has(DS)
    (folder / "empty").mkdir()
    (folder / "model.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    for name, text in mistake.files.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / name).write_bytes(data)
    return user


def told(user: User, mistake: Mistake) -> Told:
    """Run the command of a mistake; fail the test if dsat would start the user's command."""
    with (
        mock.patch.object(source, "OwnCommand", _started),
        mock.patch.object(installed_deepspeed, "_stamp", return_value=None),
    ):
        return user.types(*argv(mistake))


def _started(*_: Any, **__: Any) -> None:
    raise AssertionError("the command would be started")


def content_of(folder: Path) -> dict[Path, bytes | None]:
    """Return the content of all paths below a folder: bytes of files, None for folders."""
    paths = sorted(folder.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def entry(folder: Path, mistake: Mistake, said: Told) -> str:
    """Return the catalogue's entry for a mistake and dsat's message about it."""
    line = said.err.splitlines()[-1]
    for path, name in ((str(folder), "FOLDER"), (sys.executable, "PYTHON")):
        line = line.replace(path, name)
    line = _CHOICES.sub(lambda found: found[0].replace("'", ""), line)
    return f"\n{mistake}\n  {line.removeprefix('dsat: error: ')}\n"


def main() -> None:
    entries = []
    for mistake in mistakes():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            entries.append(entry(folder, mistake, told(user_in(folder, mistake), mistake)))
    CATALOGUE.write_text(_HEAD + "".join(entries), encoding="utf-8")


if __name__ == "__main__":
    main()
