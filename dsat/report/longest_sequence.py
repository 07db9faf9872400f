"""Memory of the recommended configuration at the longest sequences."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from dsat.memory.predictor import Basis, MemoryModel
from dsat.report import format as fmt
from dsat.tuning.run import Run


@dataclass(frozen=True)
class Longest:
    """The longest sequence to expect, in tokens, and how it is known."""

    length: int
    source: str


def longest_sequence(run: Run) -> Longest | None:
    """Return the longest sequence that the run must expect; None without sequences.

    It is `--max-seq-length`, else the model's maximum if the lengths of the trials' sequences
    varied, else the longest that was seen.
    """
    assert run.plan is not None
    seen = [o.sequences for o in run.outcomes.values() if o.sequences is not None]
    if not seen:
        return None
    if run.plan.max_seq_length is not None:
        return Longest(run.plan.max_seq_length, "--max-seq-length")
    longest = max(lengths.longest for lengths in seen)
    takes = max(lengths.model_takes or 0 for lengths in seen)
    if takes > longest and any(lengths.shortest < longest for lengths in seen):
        return Longest(takes, "the model's max_position_embeddings")
    return Longest(longest, "the longest that was seen")


def memory_warning(run: Run) -> list[str]:
    """A sentence if the best configuration is not expected to fit at the longest sequence.

    Activations grow in proportion to the length, as they do with the micro batch, whose bytes per
    sample the memory model knows. (Attention that keeps its scores needs more than that.)
    """
    assert run.plan is not None
    best, outcome, profile = run.best, run.best_outcome, run.profile
    longest = longest_sequence(run)
    if best is None or outcome is None or profile is None or longest is None:
        return []
    own, profiled = outcome.sequences, run.profiled_sequences
    if own is None or profiled is None or longest.length <= own.longest:
        return []

    model = MemoryModel(
        run.memory_basis or Basis.of_profile(profile, run.plan.switches),
        slots=run.plan.slots_per_trial,
        limit_bytes=profile.slot_memory_bytes,
        on_device=profile.host_memory_bytes > 0,
    )
    shape = model.shape(run.plan.config(best.overrides), best.script_args)

    def foreseen(micro_batch: int, length: int) -> int:
        """Bytes without what trials have corrected; the model's samples are the profile trial's."""
        return model.predicted_bytes(shape, micro_batch * length / profiled.longest)

    used = foreseen(best.batch.micro_batch, own.longest)
    measured = run.used_bytes(outcome)
    if measured is not None and outcome.memory is not None and outcome.memory.is_exact:
        used = measured
    elsewhere = used - foreseen(best.batch.micro_batch, own.longest)

    def needed(micro_batch: int) -> int:
        return foreseen(micro_batch, longest.length) + elsewhere

    most, limit = best.batch.micro_batch, profile.slot_memory_bytes
    if needed(most) <= limit:
        return []
    fits = bisect.bisect_right(range(1, most + 1), limit, key=needed)
    advice = (
        f"a micro batch of {fits} is predicted to fit (--max-micro-batch {fits})"
        if fits
        else "no micro batch is predicted to fit"
    )
    said = (
        f"The best was measured with sequences of up to {own.longest} tokens. With "
        f"{longest.length} ({longest.source}) it is predicted to need {fmt.memory(needed(most))} "
        f"per slot, more than the {fmt.memory(limit)} that there are: {advice}."
    )
    if run.plan.max_seq_length is None:
        said += " If your data have no such sequences, say so with --max-seq-length."
    return [said]
