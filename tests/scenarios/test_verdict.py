"""The verdict: the sentences that a run gets, and their numbers against the truth of the world.

Sentences are identified by their kind (`KINDS`), not by their words: whoever rewords a sentence
edits its line in that table.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from dsat.command.switches import OTHER_ACCUMULATION, OTHER_BATCH, OTHER_CONFIG, OTHER_LIMITS
from dsat.in_trial.adapters.deepspeed_calls import ZERO_INIT
from dsat.in_trial.batches import DROPPED, IGNORES_BATCH, OWN_ACCUMULATION, UNCOUNTED, UNSEEN
from dsat.in_trial.config_injection import SEVERAL_ENGINES
from dsat.values.outcome import ScriptSwitch
from testing.scenarios import Harm, User
from testing.started import Told
from testing.world import A100, GIB, Failure, Finding, World

KINDS = {
    # the first line
    "gain": r"^Gain \S+ \(.*Use \S+\.$",
    "unconfirmed gain": r"^Gain \S+, unconfirmed: .*Use \S+\.$",
    "slower": r"^Slower than yours",
    "keep": r"^Keep your configuration",
    "no gain is known": r"^Use \S+ \(",
    "nothing ran": r"^No configuration ran",
    # why your configuration is kept, or there is no gain
    "not measured yet": r"^Keep .*nothing else was measured",
    "no other ran": r"nothing else ran",
    "none is faster": r"nothing faster was found\.",
    "the faster is slower": r"\S+ measured slower: ",
    "within the noise": r"is not significantly faster",
    "not worth its batch": r"does not justify a global batch",
    "yours needs too much memory": r"your configuration runs out of memory",
    "none is confirmed": r"none of the leading configurations was confirmed",
    # what changes, and how sure it is
    "changes": r"^Changed: ",
    "measured once": r"^Confidence: low, because each configuration was measured once",
    "pairs so far": r"^Confidence: low, because the finals have completed only \d+ pair",
    "finals are off": r"\(--finals 2 or more\)\.$",
    "too few trials for finals": r"\(--max-trials \d+ or more\)\.$",
    "finals did not begin": r"continue it with --resume",
    "no finals needed": r"no other configuration is likely to be faster by enough",
    "finals are not over": r"finals have not finished",
    "yours failed again": r"your configuration failed when it was run again",
    "the faster failed again": r"faster configurations failed when run again",
    "interval": r"^Confidence: 95 % confidence interval",
    "yours is faster": r"Your configuration is faster, but its batch",
    "yours is as fast": r"Your configuration is as fast, but its batch",
    "losses agree": r"losses agree with yours",
    "losses of another batch": r"not compared: the global batch size differs",
    "losses without a seed": r"not compared: the script sets no seed",
    # advice
    "gain at your batch": r"^Batch: .* gains \S+x \(",
    "batch alone": r"^Batch: .* whole gain comes from the (larger|smaller) batch",
    "batch not measured": r"^Batch: .* nothing else was measured",
    "batch unconfirmed": r"^Batch: .* gains \S+x, unconfirmed",
    "nothing to trade": r"^Global batch: ",
    "a fixed batch": r"^Micro batch: not searched, .* feeds 4 samples .*=FLAG\.$",
    "learning rate": r"^Learning rate: ",
    "schedule": r"^Schedule: ",
    "script": r"^Script: ",
    "saving": r"^Saving: ",
    "the best reads faster": r"^Time: your configuration waits for data .*, and the best",
    "data wait": r"^Time: the best configuration waits for data .*\. ",
    "host optimizer": r"^Time: the optimizer on the host takes",
    # warnings
    "none of the others": r"^Warning: none of the \d+ other configurations ran",
    "many of the others": r"^Warning: \d+ of \d+ other configurations failed, \d+ with [EI]",
    "not the other": r"^Warning: the only other configuration did not run: ",
    "first failure": r"^Warning: \S+ failed: ",
    "excluded": r"^Warning: \S+ is excluded",
    "noisy": r"^Warning: measurements are uncertain",
    "drift": r"^Warning: your own configuration measured .* first and .* later",
    "wide interval": r"^Warning: the gain may be anything from",
    "late in both": r"^Warning: optimizer steps .* took far longer",
    "other work": r"^Warning: the gain is unreliable: the model",
    "other lengths": r"^Warning: the samples of \S+ had",
    "shapes": r"^Warning: \S+ may compute other updates in stages 1 to 3",
    "several engines": r"^Warning: the script trains several engines",
    "zero.Init": r"^Warning: the script uses deepspeed.zero.Init",
    "dropped": r"^Warning: many batches have fewer samples than the micro batch",
    "uncounted": r"^Warning: the samples that the script feeds cannot be counted.* no tensor",
    "unseen": r"^Warning: the samples that the script feeds cannot be counted.* neither",
    "own rows": r"^Warning: the script feeds \d+ samples",
    "own accumulation": r"^Warning: each optimizer step of the",
    "longer sequences": r"^Warning: the best configuration may run out of memory with sequences",
}
OWN = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1}
FREE = {"train_micro_batch_size_per_gpu": 1}
GAIN = ("gain", "changes", "interval", "losses agree")
FREED = ("gain", "changes", "interval", "losses of another batch", "batch alone", "learning rate")
ONCE = ("unconfirmed gain", "changes", "measured once")
WORKERS = {"dataloader_num_workers": ScriptSwitch((0, 2), in_arguments=True)}
HERE = {"kind": "baseline"}


@dataclass(frozen=True)
class Case:
    """A scenario, and the kinds of all sentences in its verdict."""

    kinds: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=lambda: OWN)
    options: tuple[object, ...] = ()
    trials: int = 8
    method: str = "random"
    status: int = 0
    signals: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "a gain at the same batch": Case(GAIN),
    "a gain with another batch": Case(FREED, FREE),
    "SGD": Case(FREED, {**FREE, "optimizer": {"type": "SGD", "params": {"lr": 1}}}),
    "gain at the same batch too": Case(
        (*FREED[:4], "gain at your batch", "learning rate", "saving"),
        {**FREE, "zero_optimization": {"stage": 0}},
        world={"effects": {"z0": 1.5, "z1": 1.5, "z2": 1.5}},
        trials=14,
        method="model",
    ),
    "one micro batch": Case(
        ("a fixed batch", *GAIN),
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4},
        world={
            "effects": {"z0": 1.5},
            "failures": (
                Failure("INVALID", {"micro_batch": [1, 2, 3]}, "feeds 4 samples", fixed_batch=4),
            ),
        },
    ),
    "one sample per device": Case(
        (*GAIN, "nothing to trade"),
        {"train_batch_size": 1, **FREE},
        world={"effects": {"z0": 1.5}},
    ),
    "stage 3": Case((*GAIN, "saving"), options=("--zero-stages", 3)),
    "stage 3 already": Case(
        GAIN, {**OWN, "zero_optimization": {"stage": 3}}, options=("--zero-stages", 3)
    ),
    "a schedule": Case(
        (*FREED, "schedule"),
        {**FREE, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 500}}},
    ),
    "without a seed": Case((*GAIN[:3], "losses without a seed"), world={"seeded": False}),
    "no finals": Case((*ONCE, "finals are off"), options=("--finals", 0)),
    "few trials": Case((*ONCE, "too few trials for finals"), trials=3),
    "few trials, other batch": Case(
        (*ONCE, "too few trials for finals", "batch not measured", "learning rate"), FREE, trials=3
    ),
    "no finals, other batch": Case(
        (*ONCE, "finals are off", "batch unconfirmed", "learning rate"),
        FREE,
        options=("--finals", 0, "--max-micro-batch", 2),
    ),
    "few trials, within the noise": Case(
        ("keep", "the faster is slower", "measured once", "too few trials for finals"),
        {"train_micro_batch_size_per_gpu": 16},
        world={"step_sd": 0.1},
        trials=3,
    ),
    "interrupted": Case((*ONCE, "finals did not begin"), status=130, signals={5: (signal.SIGINT,)}),
    "interrupted in the finals": Case(
        (*ONCE[:2], "pairs so far", "finals are not over"),
        world={"run_sd": 0.09},  # so that one pair is not enough
        trials=12,
        status=130,
        signals={10: (signal.SIGINT,)},
    ),
    "interrupted at once": Case(
        ("keep", "not measured yet"), status=130, signals={1: (signal.SIGINT,)}
    ),
    "yours fails again": Case(
        (*ONCE[:2], "yours failed again"),
        world={"failures": (Failure("ERROR", {"kind": "final", "micro_batch": 1}),)},
        trials=12,
    ),
    "the best fails again": Case(
        (*ONCE[:2], "the faster failed again"),
        world={"failures": (Failure("OOM", {"kind": "final", "micro_batch": [16, 24, 32]}),)},
    ),
    "yours does not fit": Case(
        ("no gain is known", "changes", "yours needs too much memory"),
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 64},
        trials=6,
    ),
    "nothing else runs": Case(
        ("keep", "no other ran", "none of the others"),
        world={"failures": (Failure("ERROR", {"kind": "search"}, "rank 0: ValueError: odd"),)},
    ),
    "many of the others do not run": Case(
        (*GAIN, "many of the others"),
        world={"failures": (Failure("ERROR", {"stage": [1, 2, 3]}, "rank 0: ValueError: odd"),)},
        trials=12,
    ),
    "many of the others cannot be measured": Case(
        (*GAIN, "many of the others"),
        world={"failures": (Failure("INVALID", {"stage": [1, 2, 3]}, "its loss is no tensor"),)},
        trials=12,
    ),
    "the only other one does not run": Case(
        ("keep", "no other ran", "not the other"),
        world={"failures": (Failure("ERROR", {"kind": "search"}, "rank 0: ValueError: odd"),)},
        trials=2,
    ),
    "nothing runs": Case(
        ("nothing ran", "first failure"),
        status=1,
        world={"failures": (Failure("ERROR", {}, "rank 0: ValueError: odd"),)},
    ),
    "yours is the best": Case(
        ("keep", "none is faster", "measured once", "no finals needed"),
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16},
        world={"effects": {"z1": 2, "z2": 2, "z3": 2}},
    ),
    "yours is the best, as far as can be seen": Case(
        ("keep", "none is faster", "measured once", "no finals needed", "noisy"),
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16},
        world={"effects": {"z1": 4, "z2": 4, "z3": 4}, "step_sd": 0.4},
    ),
    "luck": Case(
        ("keep", "the faster is slower", "interval"),
        world={
            "findings": (Finding({"kind": "final", "micro_batch": [2, 4, 8, 16]}, waiting=0.7),),
            "run_sd": 0.001,
        },
        trials=12,
    ),
    "yours is as fast": Case(
        ("keep", "within the noise", "interval"),
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16},
        world={"run_sd": 0.03},
        trials=12,
    ),
    "a batch that is not worth it": Case(
        ("keep", "not worth its batch", "interval"),
        {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}},
        options=("--min-micro-batch", 24, "--max-micro-batch", 24),
        world={"run_sd": 5e-4, "step_sd": 5e-4, "effects": {"z1": 1.02, "z2": 2, "z3": 2}},
        trials=12,
    ),
    "slower within the bounds": Case(
        (
            *("slower", "changes", "interval", "yours is faster", "losses of another batch"),
            *("gain at your batch", "learning rate"),
        ),
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 16},
        options=("--train-batch-size", 4),
        trials=12,
        method="model",
    ),
    "as fast within the bounds": Case(
        (
            *("gain", "changes", "interval", "yours is as fast", "losses of another batch"),
            *("gain at your batch", "learning rate"),
        ),
        {"train_micro_batch_size_per_gpu": 24},
        world={"effects": {"z1": 1 / 1.03}},
        options=("--train-batch-size", 16),
        trials=24,
        method="model",
    ),
    "steps of unlike lengths": Case(
        (*ONCE, "finals are off", "noisy"), options=("--finals", 0), world={"step_sd": 0.4}
    ),
    "runs of unlike lengths": Case(
        ("keep", "within the noise", "interval", "wide interval", "drift"),
        world={"run_sd": 0.17},
        trials=12,
    ),
    "it trains otherwise": Case(
        (*GAIN, "excluded"),
        world={"effects": {"z1": 0.8, "z3": 1.3}, "trains_otherwise": ("z1",)},
        trials=12,
        method="model",
    ),
    "all train otherwise": Case(
        ("keep", "none is confirmed", "excluded"),
        world={"effects": {"z1": 0.8}, "trains_otherwise": ("z1",)},
    ),
    "a machine that heats up": Case((*GAIN, "drift"), world={"drift": 0.02}, trials=24),
    "a slow loader": Case((*GAIN, "data wait"), world={"findings": (Finding(waiting=0.31),)}),
    "a loader that is fast enough for the best": Case(
        (*GAIN, "the best reads faster"),
        world={"findings": (Finding({"micro_batch": 1}, waiting=0.31), Finding(waiting=0.05))},
    ),
    "a loader with workers": Case(
        (*GAIN, "script", "the best reads faster"),
        world={
            "switches": WORKERS,
            "findings": (Finding({"dataloader_num_workers": 2}), Finding(waiting=0.31)),
        },
        trials=16,
        method="gridsearch",
    ),
    "what the script's code sets": Case(
        (*GAIN, "script"),
        world={"warnings": (OTHER_BATCH, OTHER_CONFIG, OTHER_ACCUMULATION, OTHER_LIMITS)},
    ),
    "what the meter reports": Case(
        (
            *(*GAIN, "late in both", "other work", "other lengths", "shapes", "several engines"),
            *("zero.Init", "uncounted", "dropped", "unseen", "own rows", "own accumulation"),
        ),
        options=("--zero-stages", 1),
        world={
            "by_element": False,
            "findings": (
                Finding(
                    HERE,
                    warnings=(
                        *(SEVERAL_ENGINES, UNCOUNTED, DROPPED, UNSEEN),
                        OWN_ACCUMULATION.format(k=4, advice=""),
                        IGNORES_BATCH.format(samples="12 samples", micro_batch=4, advice=""),
                    ),
                    late=(3, 6, 9),
                    evaluated=0.25,
                ),
                Finding({"stage": 1}, (ZERO_INIT,), late=(3, 9), longer=1.8),
            ),
        },
    ),
    "what may be by chance": Case(
        GAIN,
        options=("--zero-stages", 0),
        world={
            "by_element": False,
            "findings": (
                Finding(HERE, late=(3, 6), evaluated=0.25),
                Finding({"micro_batch": [2, 4, 8, 16]}, late=(3, 9), evaluated=0.21, longer=1.1),
            ),
        },
    ),
    "offloaded": Case(
        (*GAIN, "host optimizer"),
        {**OWN, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        options=("--zero-stages", 1),
        world={"gpu": dataclasses.replace(A100, memory_bytes=24 * GIB)},
    ),
    "sequences that are no longer": Case(FREED, FREE, world={"sequences": (1024, 1024, 2048)}),
    "longer sequences": Case(
        (*FREED, "longer sequences"), FREE, world={"sequences": (512, 1024, 2048)}
    ),
}


def run(user: User, case: Case) -> Told:
    user.world = World(**case.world)
    user.has(case.config)
    harm = Harm(signals=case.signals) if case.signals else None
    told = user.tunes("--max-trials", case.trials, *case.options, method=case.method, harm=harm)
    assert told.status == case.status, told.err
    return told


def kinds_of(told: Told) -> list[str]:
    """Return the kinds of a verdict's sentences, all of which must be known."""
    lines = told.json["verdict"]
    found = [kind for kind, words in KINDS.items() if any(re.search(words, line) for line in lines)]
    unknown = [
        line for line in lines if not any(re.search(words, line) for words in KINDS.values())
    ]
    assert unknown == [], "no kind has this sentence"
    return found


def line_of(told: Told, kind: str) -> str:
    [line] = [line for line in told.json["verdict"] if re.search(KINDS[kind], line)]
    assert isinstance(line, str)
    return line


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_has_the_sentences_of_its_world(user: User, name: str) -> None:
    assert sorted(kinds_of(run(user, CASES[name]))) == sorted(CASES[name].kinds)


def test_every_kind_of_sentence_has_a_scenario() -> None:
    assert {kind for case in CASES.values() for kind in case.kinds} == set(KINDS)


def test_the_gain_of_a_free_batch_is_predicted(user: User) -> None:
    """The prediction is within a quarter of the world's truth."""
    advice = line_of(run(user, CASES["one sample per device"]), "nothing to trade")
    found = re.search(r"micro batch of (\d+), .* be (\S+)x as fast", advice)
    assert found is not None, advice
    size, predicted = int(found[1]), float(found[2])
    speeds = [
        user.true_speed({**FREE, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": each})
        for each in (1, size)
    ]
    assert size > 1 and predicted == pytest.approx(speeds[1] / speeds[0], rel=0.25)
