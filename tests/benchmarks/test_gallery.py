"""The gallery's page and tables are of one piece, and their commands are those of dsat."""

from __future__ import annotations

import csv
import shlex
from dataclasses import replace

import pytest

from benchmarks import common, gallery
from benchmarks.gallery import PREDICTED
from dsat.app import estimate
from dsat.cli import parser
from dsat.inputs.estimate_settings import EstimateSettings


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
@pytest.mark.parametrize("name", [n for n in gallery.MODELS if not n.startswith("LLaVA")])
def test_the_rows_are_what_the_formula_says_today(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are of simulated models: a formula is coarser for experts and for adapters."""
    monkeypatch.setattr("dsat.command.hf_config.missing_packages", lambda: ["torch"])
    near = 0.07 if name.startswith("Mixtral") or gallery.MODELS[name].lora else 0.002
    rows = [row for row in gallery.known() if row.model == name]
    for command in {row.command for row in rows}:
        settings, _ = parser.parse(shlex.split(command)[1:])
        assert isinstance(settings, EstimateSettings) and settings.hf_config is not None
        here = replace(settings, hf_config=str(common.ROOT / settings.hf_config))
        lines = {line.strategy.label: line for line in estimate.estimate(here).lines}
        (memory,) = settings.slot_memories
        for row in (row for row in rows if row.command == command):
            line, largest = lines[row.strategy], lines[row.strategy].largest[memory]
            assert row.card_gib == pytest.approx(line.needed / 2**30, rel=near, abs=0.01)
            assert row.fits == (largest > 0)
            close = pytest.approx(largest, rel=2 * near, abs=near > 0.01)
            assert row.largest_micro_batch == close
