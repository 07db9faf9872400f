"""Memory of a slot in each phase of a step: parts by formula, and the measured peak.

The model's state is that of ZeRO (Rajbhandari et al., arXiv:1910.02054, section 3.1 and 5): with
mixed precision 2 bytes a parameter, 2 a gradient, 12 for Adam's fp32 copy and moments; without, 4,
4 and 8. Stage 1 divides the optimizer's among the slots, 2 the gradients too, 3 the parameters too.
"""

from __future__ import annotations

import math
from typing import Any

from dsat.memory.facts import model_bytes
from dsat.run.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from dsat.values.zero_strategy import NONE, of_config

PARTS = ("parameters", "optimizer", "gradients", "buckets", "activations", "rest")
_HELD = ("parameters", "optimizer")
_IN_PHASE = {
    "forward": (*_HELD, "activations"),
    "backward": (*_HELD, "gradients", "buckets", "activations"),
    "step": (*_HELD, "gradients", "buckets"),
}
_DEFAULT_BUCKET = 5 * 10**8  # deepspeed 0.19.8, runtime/zero/config.py: reduce_bucket_size


def split_memory(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the memory of the best trial, by part and as measured.

    The rest is what was measured beyond the other parts: workspaces, fragments of the allocator,
    what the formula does not know. Where less was measured than the formula says, there is none.

    Returns:
        Rows with `phase`, `part`, `gib` and `order`; and rows with `phase`, `gib` and `what`.
    """
    outcome = run.best_outcome
    if run.best is None or run.profile is None or outcome is None or outcome.memory is None:
        return [], []
    parts, rows, measured = _parts(run, run.best), [], []
    beside = outcome.memory.by_phase.get("forward", math.inf) - sum(parts[name] for name in _HELD)
    # The profile's are those of another trial, which may have kept what the best computes again.
    parts["activations"] = min(parts["activations"], max(0.0, beside))
    for phase, names in _IN_PHASE.items():
        used = outcome.memory.by_phase.get(phase)
        if used is None:
            continue
        known = {name: parts[name] for name in names}
        rest = max(0.0, used - sum(known.values()))
        rows += [
            {"phase": phase, "part": name, "gib": size / 2**30, "order": PARTS.index(name)}
            for name, size in {**known, "rest": rest}.items()
        ]
        measured.append({"phase": phase, "gib": used / 2**30, "what": "measured"})
    return rows, measured


def _parts(run: Run, trial: Trial) -> dict[str, float]:
    """Bytes on one slot."""
    assert run.profile is not None
    profile, tensor = run.profile, trial.batch.parallelism.tensor
    slots = run.plan.slots_per_trial  # AutoTP divides among its slots what ZeRO leaves whole
    config = run.plan.config(trial.overrides)
    zero, strategy = config.get("zero_optimization") or {}, of_config(config)
    size, stage = model_bytes(config, profile.param_bytes), strategy.stage
    trained = profile.trainable_params
    state = (12 if size == 2 else 8) * trained / (slots if stage >= 1 else tensor)
    bucket = zero.get("reduce_bucket_size")
    bucket = bucket if isinstance(bucket, int) else _DEFAULT_BUCKET
    gradients = size * trained / (slots if stage >= 2 else tensor)
    parameters = size * profile.num_params / (slots if stage == 3 else tensor)
    return {
        "parameters": 0.0 if strategy.offload_param != NONE else parameters,
        "optimizer": 0.0 if strategy.offload_optimizer != NONE else state,
        "gradients": gradients,
        "buckets": size * min(bucket, trained) if stage else 0.0,
        "activations": float(profile.activation_bytes_per_sample * trial.batch.micro_batch),
    }


def used_bytes(run: Run, outcome: Outcome) -> int | None:
    """Return the peak memory of a slot, as predictions count it; None if not measured.

    Where the limit is all that a slot has, the context and the libraries count as well.
    """
    memory = outcome.memory
    if memory is None or not memory.peak:
        return None
    return memory.peak + (memory.context_bytes if run.plan.slot_memory_bytes is None else 0)
