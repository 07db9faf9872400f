"""The page of a run: its tables and plots against the run's result and the truth of the world."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from dsat.prepare import installed_deepspeed
from dsat.show import page
from testing.scenarios import User
from testing.started import Told
from testing.world import World

MICRO, STAGE = "train_micro_batch_size_per_gpu", "zero_optimization.stage"


class Parts(HTMLParser):
    """The rows of the page's tables, and the specifications of its plots."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._specs, self._in_specs = "", False
        self.feed(text)

    @property
    def plots(self) -> list[dict[str, Any]]:
        found = json.loads(self._specs)
        assert isinstance(found, list)
        return found

    def layer(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a plot's layer; empty if there is no such layer."""
        layers = [each for plot in self.plots for each in plot.get("layer", [])]
        found = (each["data"]["values"] for each in layers if each.get("name") == name)
        return next(found, [])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_specs = ("id", "specs") in attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._in_specs:
            self._specs += data
        elif self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[User, Told, Parts]:
    """Run a search without memory predictions, so that some trials run out of memory."""
    user = User(tmp_path_factory.mktemp("ran"), World(slots=2, effects={"z2": 0.9}))
    user.has()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed_deepspeed, "_stamp", lambda: None)
        told = user.tunes("--max-trials", 40, "--memory-model", "none", method="random")
    assert told.status == 0, told.err
    return user, told, Parts(user.reads("report.html"))


def test_every_trial_is_in_the_table_and_the_plot(ran: tuple[User, Told, Parts]) -> None:
    _, told, parts = ran
    rows = {row[0].split()[0]: row for row in parts.rows if len(row) == 9}
    for trial in told.trials:
        row = [cell.strip() for cell in rows[trial["name"]]]
        assert row[1:4] == [str(trial[k]) for k in ("stage", MICRO, "gradient_accumulation_steps")]
    measured = {row["name"]: row["metrics"]["throughput"] for row in told.trials if row["metrics"]}
    assert {row["name"]: row["value"] for row in parts.layer("ran")} == measured
    lost = {row["name"] for row in told.trials if row["outcome"] == "OOM"}
    assert {row["name"] for row in parts.layer("oom")} == lost and len(lost) > 3


def test_each_change_has_both_values_and_what_it_does(ran: tuple[User, Told, Parts]) -> None:
    user, told, parts = ran
    rows = {row[0]: row for row in parts.rows if len(row) == 4}
    best, own = user.best_config(), told.json["baseline"]
    assert rows[MICRO][1:3] == [str(own[MICRO]), str(best[MICRO])]
    assert rows[STAGE][1:3] == ["0", "2"] and rows[STAGE][3].strip()


def test_without_vl_convert_the_page_is_plain(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page._vega.cache_clear()
    user.tunes("--max-trials", 5, method="random")
    page._vega.cache_clear()
    text = user.reads("report.html")
    assert "vegaEmbed(" not in text.split("<script>")[0] and len(text) < 200_000
    assert "pip install vl-convert-python" in text
