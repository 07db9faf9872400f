"""Mistakes in what a user writes give exit status 2 and one line with the place, before any run."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing import messages
from tests.scenarios.errors import Mistake, mistakes

MISTAKES = list(mistakes())
CATALOGUE = messages.CATALOGUE.read_text(encoding="utf-8")


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_told_in_one_line_with_its_place(mistake: Mistake, tmp_path: Path) -> None:
    user = messages.user_in(tmp_path, mistake)
    before = messages.content_of(tmp_path)
    told = messages.told(user, mistake)
    line = told.err.splitlines()[-1].removeprefix("dsat: error: ")
    assert told.status == 2 and told.out == "", told.err
    assert line.removeprefix("argument ").startswith(mistake.where), line
    assert [word for word in mistake.words if word not in line] == []
    usage = told.err.startswith("usage: ")
    assert usage or len(told.err.splitlines()) == 1, told.err
    assert messages.content_of(tmp_path) == before, "nothing is written"
    assert messages.entry(tmp_path, mistake, told) in CATALOGUE, "run `python -m testing.messages`"


def test_the_catalogue_has_no_other_mistakes() -> None:
    assert CATALOGUE.count("\ndsat ") == len(MISTAKES)
