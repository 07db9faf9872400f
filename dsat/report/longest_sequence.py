"""The longest sequences: of which one sample fits, and the memory of a best configuration there."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsat.command import switches
from dsat.memory.estimate import CLOSED_FORM
from dsat.memory.predictor import Basis, MemoryModel
from dsat.report import projection
from dsat.run.run import Run
from dsat.show.memory_parts import used_bytes
from dsat.values import format as fmt
from dsat.values.parallelism import Parallelism
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy


@dataclass(frozen=True)
class Longest:
    """The longest sequence on a number of slots with a strategy.

    Attributes:
        memory_bytes: of a slot.
        parallelism: with which it is longest; the one that divides least among equals.
        tokens: 0 if not even a short one fits.
        host_bytes: of the host's memory, for each slot.
        source: `SIMULATED` at about this length, or `CLOSED_FORM`.
        note: why it was not simulated, if it was to be.
        switches: of the model, that differ from the script's own.
        speed: of training on such sequences, on a card of the table.
    """

    slots: int
    strategy: Strategy
    memory_bytes: int
    parallelism: Parallelism
    tokens: int
    host_bytes: int
    source: str = CLOSED_FORM
    note: str = ""
    switches: Mapping[str, Any] = field(default_factory=dict)
    speed: projection.Row | None = None

    @property
    def label(self) -> str:
        """The strategy and the switches, for people."""
        written = (switches.write(name, value) for name, value in self.switches.items())
        return ", ".join((self.strategy.label, *written))

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "strategy": self.strategy.name,
            "parallelism": vars(self.parallelism),
            "switches": dict(self.switches),
            "speed": self.speed
            and {
                **self.speed.to_json(),
                "tokens_per_second": self.tokens * self.speed.samples_per_second,
            },
        }


@dataclass(frozen=True)
class LongestSequences:
    """Answer of `dsat estimate --longest-sequence`.

    Attributes:
        name: of the experiment, or of the command's script.
        card: whose memory and speed it is; empty without one.
        model_takes: the model's `max_position_embeddings`; 0 if it has none.
    """

    name: str
    longest: Sequence[Longest]
    card: str = ""
    model_takes: int = 0

    @property
    def is_complete(self) -> bool:
        """False if lines were to be simulated and none could be; the formula answers for those."""
        return not all(row.note for row in self.longest)

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.longest]
        return {**vars(self), "longest": rows}

    def __str__(self) -> str:
        found = self.longest
        lines = [f"{self.name}: the longest sequence of one sample"]
        for slots, group in itertools.groupby(found, key=lambda each: each.slots):
            what = fmt.count(slots, self.card or "slot")
            lines += ["", f"{what}:", "", *_of_slots(list(group))]
        for note in dict.fromkeys(each.note for each in found if each.note):
            lines += ["", f"By formula where it could not be simulated: {note}"]
        sources = " and ".join(dict.fromkeys(row.source for row in found))
        lines += [
            "",
            "sp: slots that divide each sequence (Ulysses); tp: that divide each layer (AutoTP). "
            f"Source: {sources}. 5 % are left free; the device's context and the communication "
            "library come on top.",
        ]
        if 0 < self.model_takes < max(row.tokens for row in found):
            lines.append(
                f"The model itself takes {self.model_takes:,} tokens (max_position_embeddings): "
                "longer ones fit in memory, and need a model with more positions."
            )
        if self.card:
            lines.append(f"Not modelled in the speed: {projection.NOT_MODELLED}.")
        return "\n".join(lines)


def _of_slots(found: Sequence[Longest]) -> list[str]:
    sizes = list(dict.fromkeys(each.memory_bytes for each in found))
    has_speed = any(each.speed for each in found)
    heads = ["strategy", *(f"tokens on {fmt.memory(size)}" for size in sizes), "host per slot"]
    cells = []
    for label, group in itertools.groupby(found, key=lambda each: each.label):
        of_strategy = list(group)
        most = max(each.host_bytes for each in of_strategy)
        row = [label, *(_length(each) for each in of_strategy), fmt.memory(most) if most else "-"]
        cells.append([*row, *([_speed(of_strategy[0])] if has_speed else [])])
    heads += ["speed"] if has_speed else []
    return Table(heads, cells, numbers=heads[1 : len(sizes) + 2]).markdown()


def _length(row: Longest) -> str:
    if not row.tokens:
        return "-"
    sizes = row.parallelism
    named = (("tp", sizes.tensor), ("sp", sizes.sequence))
    return f"{row.tokens:,}" + "".join(f" {name}{size}" for name, size in named if size > 1)


def _speed(row: Longest) -> str:
    return "-" if row.speed is None else projection.rate(row.speed, row.tokens)


def longest_sequence(run: Run) -> tuple[int, str] | None:
    """Return the longest sequence to expect, in tokens, and its source; None without sequences.

    It is `--max-seq-length`, else the model's maximum if the lengths of the trials' sequences
    varied, else the longest that was seen.
    """
    seen = [o.sequences for o in run.outcomes.values() if o.sequences is not None]
    if not seen:
        return None
    if run.plan.max_seq_length is not None:
        return run.plan.max_seq_length, "--max-seq-length"
    longest = max(lengths.longest for lengths in seen)
    takes = max(lengths.model_takes or 0 for lengths in seen)
    if takes > longest and any(lengths.shortest < longest for lengths in seen):
        return takes, "the model's max_position_embeddings"
    return longest, "the longest that was seen"


def memory_warning(run: Run) -> list[str]:
    """Return a sentence if the best configuration may not fit at the longest sequence.

    Activations grow in proportion to the length, as they do with the micro batch, whose bytes per
    sample the memory model knows. (Attention that keeps its scores needs more than that.)
    """
    best, outcome, profile = run.best, run.best_outcome, run.profile
    expected = longest_sequence(run)
    profiled = None if run.profiled is None else run.profiled.sequences
    if best is None or outcome is None or profile is None or expected is None:
        return []
    measured_with, (length, source) = outcome.sequences, expected
    if measured_with is None or profiled is None or length <= measured_with.longest:
        return []
    model = MemoryModel(
        run.memory_basis or Basis.of_profile(profile, run.plan.switches),
        slots=run.plan.slots_per_trial,
        limit_bytes=profile.slot_memory_bytes,
        on_device=profile.host_memory_bytes > 0,
    )
    shape = model.shape(run.plan.config(best.overrides), best.script_args)

    def predicted(micro_batch: int, tokens: int) -> int:
        """Bytes by the model, whose samples are as long as the profile trial's."""
        return model.predicted_bytes(shape, micro_batch * tokens / profiled.longest)

    most, limit = best.batch.micro_batch, profile.slot_memory_bytes
    error, used = 0, used_bytes(run, outcome)
    if used is not None and outcome.memory is not None and outcome.memory.is_exact:
        error = used - predicted(most, measured_with.longest)

    def needed(micro_batch: int) -> int:
        return predicted(micro_batch, length) + error

    if needed(most) <= limit:
        return []
    fits = bisect.bisect_right(range(1, most + 1), limit, key=needed)
    advice = "no micro batch is predicted to fit"
    if fits:
        advice = f"a micro batch of {fits} is predicted to fit (--max-micro-batch {fits})"
    warning = (
        f"The best was measured with sequences of up to {measured_with.longest} tokens. With "
        f"{length} ({source}) it is predicted to need {fmt.memory(needed(most))} per slot, more "
        f"than the {fmt.memory(limit)} that there are: {advice}."
    )
    if run.plan.max_seq_length is None:
        warning += " If your data have no such sequences, say so with --max-seq-length."
    return [warning]
