"""Messages between the client and the server of simulations: JSON files in a private folder.

The server writes the facts of its script, and the client writes questions. Each simulation is a
separate process, and writes its answer. If it dies, the server answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsat.values import parallelism
from dsat.values.files import written_atomically
from dsat.values.parallelism import Parallelism

SCRIPT_FILE = "script.json"
QUESTIONS = "question-*.json"
QUESTION_FILE, ANSWER_FILE = "question-{:06}.json", "answer-{:06}.json"  # in order of questions
WALL_FACTOR = 5  # a simulation's limit of wall-clock time over its limit of processor time


class SimulationUnsupported(Exception):
    """The script does something that cannot be simulated faithfully."""


class Question(NamedTuple):
    """A configuration to simulate.

    Attributes:
        config: the whole DeepSpeed configuration; the script's values replace "auto" in it.
        micro_batch: replaces the configuration's.
        slots, rank: number of ranks, and the rank to simulate.
        switches: values to set on the model; the simulator adds its own.
        activations_only: whether to simulate only the model's passes, without DeepSpeed.
        traced: whether to record kernels and collectives.
        as_cpu: whether ranks run on a CPU. The simulator sets this and `workspace_bytes`.
        workspace_bytes: workspace of cuBLAS.
    """

    config: Mapping[str, Any]
    micro_batch: int
    slots: int
    switches: Mapping[str, Any] = {}
    activations_only: bool = False
    traced: bool = False
    rank: int = 0
    as_cpu: bool = False
    workspace_bytes: int = 0

    @property
    def parallelism(self) -> Parallelism:
        """Tensor and sequence parallelism of the configuration."""
        return parallelism.read_parallelism(self.config)

    @property
    def gas(self) -> int:
        """Number of micro steps per optimizer step."""
        return int(self.config.get("gradient_accumulation_steps", 1))


class ScriptFacts(NamedTuple):
    """Facts of a script at its first training step.

    Attributes:
        sequence_length: tokens per sample of its first batch; None if samples are other data.
        model_takes: maximum number of positions of the model; 0 if unknown.
        is_quadratic: whether attention stores a value for each pair of tokens, so that memory grows
            with the square of the length.
        sizes: fields of `ModelFacts` that need no simulation: sizes of parameters,
            `uses_zero_init` and `hidden_size`.
        optimizer: an `optimizer` section that describes the optimizer passed to
            `deepspeed.initialize`; empty if there is none.
    """

    sequence_length: int | None
    model_takes: int
    is_quadratic: bool = False
    sizes: Mapping[str, Any] = {}
    optimizer: Mapping[str, Any] = {}


def send(path: Path, message: Mapping[str, Any]) -> None:
    """Write a message atomically: a reader sees all of it or nothing."""
    with written_atomically(path) as temporary:
        temporary.write_text(json.dumps(message), encoding="utf-8")


def receive(path: Path) -> dict[str, Any] | None:
    """Read a message and remove its file; None if there is none yet."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)  # a question may be withdrawn meanwhile
    message: dict[str, Any] = json.loads(text)
    return message
