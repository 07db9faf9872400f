"""What the README repeats from the code is what the code says."""

from __future__ import annotations

from testing import readme


def test_the_table_of_options_is_the_declared_one() -> None:
    text = readme.PATH.read_text(encoding="utf-8")
    assert readme.with_table(text) == text, "run `python -m testing.readme`"
