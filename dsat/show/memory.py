"""Memory that trials used, and that the best configuration needs at the longest sequence."""

from __future__ import annotations

import bisect

from dsat.memory.predictor import Basis, MemoryModel
from dsat.run.run import Run
from dsat.values import format as fmt
from dsat.values.outcome import Outcome


def used_bytes(run: Run, outcome: Outcome) -> int | None:
    """Return the peak bytes of a device, counted as in predictions; None if not measured.

    Without `--slot-memory`, the driver's context and libraries are included.
    """
    memory = outcome.memory
    if memory is None or not memory.peak:
        return None
    return memory.peak + (memory.context_bytes if run.plan.slot_memory_bytes is None else 0)


def longest_sequence(run: Run) -> tuple[int, str] | None:
    """Return the longest expected sequence in tokens, and its source; None without sequences.

    The source is `--max-seq-length` if set, else the model's maximum if lengths varied and it is
    larger, else the longest sequence seen.
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
    return longest, "the longest one seen"


def memory_warning(run: Run) -> list[str]:
    """Return a sentence if the best configuration may not fit at the longest sequence.

    Activations are assumed to grow linearly with the length. Attention that stores its scores
    needs more.
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
        """Return predicted bytes, scaled from the sequence length of the profile trial."""
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
    advice = "No micro batch is predicted to fit"
    if fits:
        advice = f"A micro batch of {fits} is predicted to fit (--max-micro-batch {fits})"
    warning = (
        f"the best configuration may run out of memory with sequences of {length} tokens "
        f"({source}): predicted {fmt.memory(needed(most))} of {fmt.memory(limit)} per device. It "
        f"was measured with at most {measured_with.longest} tokens. {advice}."
    )
    if run.plan.max_seq_length is None:
        warning += " If your sequences are shorter, set --max-seq-length."
    return [warning]
