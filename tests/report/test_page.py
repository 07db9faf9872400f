from __future__ import annotations

import json
import sys
from html.parser import HTMLParser

import pytest

from dsat.report import page, page_rows
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.helpers import World, failed
from testing.made_up_runs import HOSTILE, Measured, events_of_world, run_of_world


class Parts(HTMLParser):
    """Tags, rows of tables and the scripts' text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.specs = ""
        self._in_specs = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in_specs = ("id", "specs") in attrs

    def handle_data(self, data: str) -> None:
        if self._in_specs:
            self.specs += data


def test_every_trial_is_in_the_table_and_every_one_that_ran_in_the_plot() -> None:
    run = run_of_world()
    parts = Parts(page.html(run, "trials", "torchrun train.py"))
    throughput = json.loads(parts.specs)[0]
    layers = {layer.get("name"): layer["data"]["values"] for layer in throughput["layer"]}
    measured = [t for t in run.trials.values() if run.value(t) is not None]
    lost = [o for o in run.outcomes.values() if o.kind.value in ("OOM", "HOST_OOM")]
    assert len(measured) > 10 and len(lost) > 3
    assert len(layers["ran"]) == len(measured)
    assert len(layers["oom"]) == len(lost)
    text = page.html(run, "trials", "torchrun train.py")
    assert all(f"trials/{trial.name}/stderr.log" in text for trial in run.trials.values())


def test_hostile_text_stays_text() -> None:
    class Hostile(Measured):
        def outcome(self, trial: Trial) -> Outcome:
            found = super().outcome(trial)
            return failed("ERROR", HOSTILE) if not found.ok else found

    text = page.html(run_of_world(Hostile()), "trials", f"train {HOSTILE}")
    parts = Parts(text)
    assert "img" not in parts.tags
    assert parts.tags.count("script") == 3  # Vega, the specifications, the page's own
    assert "<script>document.body" not in text
    json.loads(parts.specs)


def test_a_message_of_megabytes_does_not_make_the_page_as_large() -> None:
    class Long(Measured):
        def outcome(self, trial: Trial) -> Outcome:
            found = super().outcome(trial)
            return failed("ERROR", "x" * 5_000_000) if not found.ok else found

    small = len(page.html(run_of_world(), "trials", "train"))
    assert len(page.html(run_of_world(Long()), "trials", "train")) < small + 200_000


def test_without_vl_convert_the_page_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page._vega.cache_clear()
    run = run_of_world()
    text = page.html(run, "trials", "train")
    page._vega.cache_clear()
    measured = [trial for trial in run.trials.values() if run.value(trial) is not None]
    assert text.count("<title>z") == len(measured)
    assert "vegaEmbed(" not in text.split("<script>")[0]
    assert "dsat[report]" in text
    assert len(text) < 200_000


def test_a_page_is_drawn_while_trials_run() -> None:
    events = events_of_world(trials=6)
    for end in range(1, len(events) + 1):
        run = Run(events[:end])
        if run.trials:
            html = page.html(run, "trials", "")
            assert html.count(">running<") == len(run.trials) - len(run.outcomes)


def test_a_run_of_which_nothing_ran_has_a_page_too() -> None:
    class Broken(World):
        def outcome(self, trial: Trial) -> Outcome:
            return failed("ERROR", "no")

    assert "No configuration ran." in page.html(run_of_world(Broken()), "trials", "")


def test_changes_name_the_gain_of_pairs_of_trials() -> None:
    run = run_of_world()
    changes = {change.key: change for change in page_rows.changes(run)}
    assert run.best is not None
    micro_batch = changes["train_micro_batch_size_per_gpu"]
    assert (micro_batch.own, micro_batch.best) == ("4", str(run.best.batch.micro_batch))
    assert changes["zero_optimization.stage"].reason


def test_a_paired_gain_is_of_trials_that_differ_in_nothing_else() -> None:
    run = run_of_world(method="gridsearch", trials=60)
    key = "train_micro_batch_size_per_gpu"
    sizes = sorted({t.batch.micro_batch for t in run.trials.values() if run.value(t)})
    gain, pairs = page_rows.paired_gain(run, key, sizes[0], sizes[-1])
    back, same = page_rows.paired_gain(run, key, sizes[-1], sizes[0])
    assert pairs == same > 0
    assert gain is not None and back == pytest.approx(1 / gain)
    assert page_rows.paired_gain(run, key, sizes[0], 10**6) == (None, 0)
