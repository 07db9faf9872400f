"""Messages between the client of a simulation and its server: JSON files in a private folder.

The server writes the facts of its script, the client questions, and each simulation, which is a
process, its answer.
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
WALL_FACTOR = 5  # seconds on the clock in which a simulation may use one of its processor time


class SimulationUnsupported(Exception):
    """The script does what cannot be simulated faithfully."""


class Question(NamedTuple):
    """A configuration to simulate.

    Attributes:
        config: the whole DeepSpeed configuration, in which "auto" is the script's to decide.
        micro_batch: whatever the configuration says.
        switches: of the model, beside the simulator's own.
        activations_only: the model's passes alone.
        traced: kernels and collectives are recorded.
        as_cpu: the ranks run on a CPU. The simulator sets this and `workspace_bytes`.
        workspace_bytes: what cuBLAS takes on a device while it multiplies.
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
        """Division of layers and sequences among the ranks."""
        return parallelism.of_config(self.config)

    @property
    def gas(self) -> int:
        """Micro steps of an optimizer step."""
        return int(self.config.get("gradient_accumulation_steps", 1))


class ScriptFacts(NamedTuple):
    """Facts of a script at its first training step.

    Attributes:
        sequence_length: tokens of a sample of its first batch, if samples are sequences of tokens.
        hidden_size: of its model, by which a Trainer fills in "auto"; None if it is not known.
        model_takes: the model's `max_position_embeddings`; 0 if it has none.
        sizes: of its model for `ModelFacts`, with the type in which DeepSpeed trains it, and
            whether stage 3 partitions it while the script makes it.
        optimizer: the `optimizer` section that stands for what it passes to
            `deepspeed.initialize`; empty if it passes none.
    """

    sequence_length: int | None
    hidden_size: int | None
    model_takes: int
    sizes: Mapping[str, Any] = {}
    optimizer: Mapping[str, Any] = {}


def send(path: Path, message: Mapping[str, Any]) -> None:
    """Write a message, which a reader sees whole or not at all."""
    with written_atomically(path) as temporary:
        temporary.write_text(json.dumps(message), encoding="utf-8")


def receive(path: Path) -> dict[str, Any] | None:
    """Read a message and remove it; None if it has not come."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    path.unlink(missing_ok=True)  # a question may be withdrawn meanwhile
    message: dict[str, Any] = json.loads(text)
    return message
