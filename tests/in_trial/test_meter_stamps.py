"""The meter agrees within 2 % with time stamps that scripts of every kind write."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import mean

import pytest

from testing.local import PROGRAMS, bench_of

pytestmark = pytest.mark.nightly  # compares two clocks

FIRST, STEPS = 3, 20
MICRO_BATCH = 8
TOLERANCE = 0.02

# Called by the script at the end of each optimizer step. Its wait counts as the script's own time,
# like loading data, and makes steps long enough for a comparison.
STAMP = """
import os, time

def stamp():
    with open(os.path.join(os.environ["DSAT_TRIAL_DIR"], "stamps.txt"), "a") as file:
        file.write(f"{time.perf_counter()!r}\\n")
    time.sleep(0.06)
"""
HERE = "__import__('stamp').stamp()"

# By kind of script: a program, its file, a part of its text, and the replacement.
SCRIPTS = {
    "plain": (
        "seeded",
        "train.py",
        "        backward(loss)\n        engine.step()\n",
        f"        backward(loss)\n        engine.step()\n        {HERE}\n",
    ),
    "own accumulation": (
        "seeded",
        "train.py",
        "        loss = engine(rows(step, micro_step, size, gas).to(engine.device))\n"
        "        log(loss)\n"
        "        backward(loss)\n"
        "        engine.step()\n",
        "        for call in range(1, 5):\n"
        "            backward(engine(rows(step, micro_step, size, gas)))\n"
        "        engine.step()\n"
        f"        {HERE}\n",
    ),
    "Trainer": (
        "hf_trainer",
        "train.py",
        "        if self.path and state.global_step",
        f"        {HERE}\n        if self.path and state.global_step",
    ),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_meter_agrees_with_the_scripts_own_clock(kind: str, tmp_path: Path) -> None:
    program, name, part, stamped = SCRIPTS[kind]
    folder = tmp_path / "program"
    shutil.copytree(PROGRAMS / program, folder)
    (folder / "stamp.py").write_text(STAMP)
    text = (folder / name).read_text()
    assert text.count(part) == 1
    (folder / name).write_text(text.replace(part, stamped))

    steps = {"start_step": FIRST, "end_step": FIRST + STEPS - 1, "max_steps": STEPS}
    with bench_of(str(folder), tmp_path, imported=True, **steps) as bench:
        trial = bench.trial(micro_batch=MICRO_BATCH)
        outcome = bench.run(trial)
        assert outcome.ok and outcome.metrics is not None, bench.log(trial)
        stamps = [float(line) for line in bench.read(trial, "stamps.txt").splitlines()]

    # The last step that is measured ends the script, before its stamp.
    assert len(stamps) == FIRST - 1 + STEPS - 1 and len(outcome.step_ms) == STEPS
    by_script = [
        1e3 * (b - a) for a, b in zip(stamps[FIRST - 2 :], stamps[FIRST - 1 :], strict=False)
    ]
    assert mean(outcome.step_ms[:-1]) == pytest.approx(mean(by_script), rel=TOLERANCE)

    fed = MICRO_BATCH * (4 if kind == "own accumulation" else 1)
    lost = outcome.metrics.accidents
    kept = sorted(outcome.step_ms)[: STEPS - lost]
    assert outcome.metrics.throughput == pytest.approx(fed / (mean(kept) / 1e3), rel=1e-3)
