from __future__ import annotations

import json
import math
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from dsat.report import memory_parts, page
from dsat.report.changes import changes, paired_gain
from dsat.report.run_view import RunView
from dsat.report.speed_model import SpeedModel
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.helpers import failed
from testing.made_up_runs import HOSTILE, Lawful, Measured, Steady, events_of_world, run_of_world


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


def _layer_of(spec: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a plot's layer; empty if it has none of that name."""
    return next(
        (layer["data"]["values"] for layer in spec.get("layer", []) if layer.get("name") == name),
        [],
    )


def test_every_trial_is_in_the_table_and_every_one_that_ran_in_the_plot() -> None:
    run = run_of_world()
    parts = Parts(page.html(run, "trials", "torchrun train.py"))
    throughput = next(spec for spec in json.loads(parts.specs) if _layer_of(spec, "oom"))
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


def test_a_folder_whose_name_is_no_text_has_a_link() -> None:
    assert 'href="a%FF/' in page.html(run_of_world(), "a\udcff", "train")


def test_without_vl_convert_the_page_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page._vega.cache_clear()
    run = run_of_world()
    text = page.html(run, "trials", "train")
    page._vega.cache_clear()
    assert "vegaEmbed(" not in text.split("<script>")[0]
    assert "pip install vl-convert-python" in text
    assert len(text) < 200_000


def test_a_page_is_drawn_while_trials_run() -> None:
    events = events_of_world(trials=6)
    for end in range(1, len(events) + 1):
        run = Run(events[:end])
        if run.trials:
            html = page.html(run, "trials", "")
            assert html.count(">running<") == len(run.trials) - len(run.outcomes)


def test_changes_name_both_values_and_what_the_setting_does() -> None:
    run = run_of_world()
    found = {change.key: change for change in changes(RunView.of(run), None)}
    assert run.best is not None
    micro_batch = found["train_micro_batch_size_per_gpu"]
    assert (micro_batch.own, micro_batch.best) == ("4", str(run.best.batch.micro_batch))
    assert found["zero_optimization.stage"].reason


def test_a_paired_gain_is_of_trials_that_differ_in_nothing_else() -> None:
    run = run_of_world(method="gridsearch", trials=60)
    key, view = "train_micro_batch_size_per_gpu", RunView.of(run)
    sizes = sorted({t.batch.micro_batch for t in run.trials.values() if run.value(t)})
    gain, count = paired_gain(view, key, sizes[0], sizes[-1])
    back, same = paired_gain(view, key, sizes[-1], sizes[0])
    assert count == same > 0
    assert gain is not None and back == pytest.approx(1 / gain)
    assert paired_gain(view, key, sizes[0], 10**6) == (None, 0)


def test_the_finals_are_told_as_pairs_beside_the_gain() -> None:
    run = run_of_world(Steady(), finals=None)
    assert run.finals is not None and run.finals.over and run.best is not None
    text = page.html(run, "trials", "train")
    specs = json.loads(Parts(text).specs)
    rows = next(rows for spec in specs if (rows := _layer_of(spec, "finals")))
    assert len(rows) == 2 * len(run.finals.pairs) >= 4
    by_pair = [[r["value"] for r in rows if r["pair"] == n + 1] for n in range(len(rows) // 2)]
    assert by_pair == [pytest.approx([math.exp(x) for x in pair]) for pair in run.finals.pairs]
    assert {row["which"] for row in rows} == {"yours", run.best.name}
    comparison = run.finals.comparison
    assert comparison is not None and f"{comparison.gain.ratio:.2f}" in text


def test_the_memory_of_the_best_is_told_in_parts() -> None:
    run = run_of_world(Steady())
    best, profile = run.best, run.profile
    assert best is not None and profile is not None and best.stage > 0
    rows = {(r["phase"], r["part"]): r["gib"] * 2**30 for r in memory_parts.of_best(run)[0]}
    # In fp32 on one slot: 4 bytes of parameter, 8 of Adam's moments, 4 of gradient.
    assert rows["forward", "parameters"] == pytest.approx(4 * profile.num_params, rel=1e-3)
    assert rows["backward", "optimizer"] == pytest.approx(8 * profile.num_params, rel=1e-3)
    assert rows["backward", "gradients"] == pytest.approx(4 * profile.num_params, rel=1e-3)
    for phase, used in (("forward", 20), ("backward", 30)):
        whole = sum(size for (name, _), size in rows.items() if name == phase)
        rest = rows[phase, "rest"]
        assert rest == 0 or whole == pytest.approx(used * 2**30, rel=1e-3)
    # As in the profile, but no more than was measured beside the model.
    beside = 20 * 2**30 - 12 * profile.num_params
    kept = min(best.batch.micro_batch * 1e9, beside)
    assert rows["forward", "activations"] == pytest.approx(kept, rel=1e-3)


def test_the_model_of_speed_finds_what_the_machine_does() -> None:
    run = run_of_world(Lawful(), trials=60, method="random")
    view = RunView.of(run)
    model, best = SpeedModel.of(view), run.best
    assert view.best is not None and model is not None and best is not None
    band = {(r["strategy"], r["micro_batch"]): (r["low"], r["high"]) for r in model.band()}
    assert len({strategy for strategy, _ in band}) >= 2
    size = best.batch.micro_batch
    predicted = model.gain(view.best, "train_micro_batch_size_per_gpu", 4)
    assert predicted is not None
    truth = (size / (20 + 2 * size)) / (4 / (20 + 2 * 4))
    ratio, low, high = predicted
    assert low < ratio < high and [low, ratio, high] == pytest.approx([truth] * 3, 0.1)
    stage = model.gain(view.best, "zero_optimization.stage", 2 if best.stage != 2 else 1)
    assert stage is not None
    expected = 1.05 if best.stage != 2 else 1 / 1.05
    assert stage[1] < expected < stage[2]
    assert model.gain(view.best, "zero_optimization.sub_group_size", 5) is None


def test_a_gain_says_whether_trials_or_the_model_tell_it() -> None:
    view = RunView.of(run_of_world(Steady()))
    with_model = {change.key: change.effect for change in changes(view, SpeedModel.of(view))}
    alone = {change.key: change.effect for change in changes(view, None)}
    by_model = {key for key, effect in with_model.items() if "by the model of speed" in effect}
    assert by_model and all(alone[key] == "not measured" for key in by_model)
    assert all(with_model[key] == alone[key] for key in with_model.keys() - by_model)
    assert with_model["train_batch_size"] == "that of micro batch and accumulation"
