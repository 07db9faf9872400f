"""The gallery's page and tables agree with each other, and its commands are valid."""

from __future__ import annotations

import csv

import pytest

from benchmarks import gallery
from benchmarks.gallery import PREDICTED
from testing import warm_command, warm_host


def test_the_page_shows_what_the_tables_hold() -> None:
    found = gallery.known()
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.page(found), "run `make gallery`"
    with (gallery.FOLDER / "gallery.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["command"] for row in table] == [row.command for row in found]
    assert {row.model for row in found} == set(gallery.MODELS)
    assert {row.machine for row in found} == set(gallery.MACHINES)
    assert {row.status for row in found} == {PREDICTED}
    speeds = [(row.low or 0.0, row.tokens_per_second or 0.0, row.high or 0.0) for row in found]
    assert all(0 < low < mean < high for low, mean, high in speeds if mean)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", gallery.MODELS)
def test_the_rows_are_predicted_the_same_today(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    before = [row for row in gallery.known() if row.model == name]
    for row, known in zip(gallery.predicted(name, gallery.MODELS[name]), before, strict=True):
        assert (row.machine, row.strategy, row.fits) == (known.machine, known.strategy, known.fits)
        assert row.gpu_gib == pytest.approx(known.gpu_gib, rel=0.002, abs=0.01)
        assert row.largest_micro_batch == pytest.approx(known.largest_micro_batch, rel=0.004)
