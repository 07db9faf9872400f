"""Predicted against published GPU memory: prints a table.

    python3 -m benchmarks.published [--only WORD]

This is a table of docs/predicting.md. If the layers of a model are published, it is simulated;
otherwise the closed form predicts the part that the model's sizes decide. Unless noted, published
values are peaks of memory allocated by torch. Rows that cannot be right are printed, not counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Bar
from dsat.command import entrypoint, experiment
from dsat.memory import closed_form
from dsat.memory.estimate import MemoryEstimate
from dsat.memory.facts import ModelFacts
from dsat.prepare.simulated_model import start_engine
from dsat.prepare.source import Source
from dsat.simulation.client import SimulationUnavailable, Simulator
from dsat.simulation.protocol import Question

DATA = Path(__file__).parent / "data" / "published.json"
FOLDER = Path(__file__).parent / "programs" / "published"
MEDIAN, WORST = 0.04, 0.10
_TIMEOUT_S = 600.0
_LAYERS = 36  # layers of Qwen3-8B, whose q_proj is 4096 x 4096 and v_proj 1024 x 4096
_ADAPTERS = _LAYERS * 16 * ((4096 + 4096) + (4096 + 1024))
_LORA = ModelFacts(8_190_735_360 + _ADAPTERS, _ADAPTERS, 4096 * 16, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """A published memory size of a model that is simulated.

    Attributes:
        source: where it was published.
        what: what was measured: a key of `_SIZES`.
        config: the DeepSpeed configuration.
        slots: data-parallel ranks.
        measured_gib: the published size.
        command: a command that trains the model, in `FOLDER`.
        note: the part of the configuration that is not published.
        needs: module of DeepSpeed that exists only if it supports the configuration.
        not_counted: why the row cannot be right, or describes something else.
    """

    source: str
    what: str
    config: Mapping[str, Any]
    slots: int
    measured_gib: float
    command: str
    micro_batch: int
    note: str
    needs: str
    not_counted: str

    @property
    def offloads_or_adapts(self) -> bool:
        """Whether states are offloaded to the host, or adapters are trained."""
        return "offload" in json.dumps(self.config) or "--lora" in self.command

    def predicted(self) -> int:
        """Return the prediction in bytes.

        Peaks of steps exclude the copy of all parameters that DeepSpeed makes at start-up if
        memory allows.

        Raises:
            SimulationUnavailable: it cannot be simulated here.
        """
        if not _is_there(self.needs):
            raise SimulationUnavailable(f"the installed DeepSpeed has no {self.needs}")
        micro = {"train_micro_batch_size_per_gpu": self.micro_batch}
        whole = {"gradient_accumulation_steps": 1, **self.config, **micro}
        words = self.command.split()
        user = experiment.make_experiment(words, "published", FOLDER, whole, "the row")
        source = Source(user, entrypoint.parse(words, FOLDER))
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.closing(start_engine(source, Path(folder), _TIMEOUT_S)) as engine,
            Simulator(engine, as_cpu=False, timeout_s=_TIMEOUT_S) as simulator,
        ):
            [found] = simulator.estimates([Question(whole, self.micro_batch, self.slots)])
        if isinstance(found, str):
            raise SimulationUnavailable(found)
        return _SIZES[self.what](found, self.slots)


_SIZES: Mapping[str, Callable[[MemoryEstimate, int], int]] = {
    "steps": lambda found, _: max(found.forward, found.backward, found.step),
    "start-up": lambda found, _: found.init,
    "host": lambda found, ranks: found.host * ranks,
}


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing, too
        return False


def read() -> Iterator[Row]:
    """Yield the rows of the data."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for values in data["rows"]:
        row = dict(zip(data["columns"], values, strict=True))
        yield Row(**{**row, "config": data["configs"][row["config"]]})


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose source has this")
    word, numbers = parser.parse_args().only, ("slots", "measured GiB", "predicted GiB", "error")
    common.print_head("source", "what", *numbers, "note", numbers=numbers)
    errors: dict[bool, list[float]] = {False: [], True: []}
    for row in (row for row in read() if word in row.source):
        try:
            predicted = row.predicted()
        except SimulationUnavailable as reason:
            print(f"{row.source}: {reason}", file=sys.stderr)
            continue
        note = f"not counted: {row.not_counted}" if row.not_counted else row.note
        error = _print(row.source, row.what, row.slots, row.measured_gib, predicted, note)
        if not row.not_counted:
            errors[row.offloads_or_adapts].append(abs(error))
    lora = "deepspeedai/DeepSpeed#8029, Qwen3-8B with LoRA"
    if word in lora:
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
        found = closed_form.estimate(_LORA, config, slots=1, micro_batch=1)
        error = _print(lora, "start-up", 1, 15.36, found.init, "after initialisation")
        errors[True].append(abs(error))
    common.print_bars([bar for bars in errors.items() for bar in _bars(*bars)])


def _bars(offloads_or_adapts: bool, errors: Sequence[float]) -> Iterator[Bar]:
    name = "with offloading or LoRA" if offloads_or_adapts else "others"
    if errors:
        median, worst = statistics.median(errors), max(errors)
        text = f"{name} ({len(errors)} rows): off by at most"
        yield Bar(f"{text} {MEDIAN:.0%} in the median", f"{median:.1%}", median <= MEDIAN)
        yield Bar(f"{text} {WORST:.0%} at worst", f"{worst:.1%}", worst <= WORST)


def _print(
    source: str, what: str, slots: int, measured_gib: float, predicted: float, note: str
) -> float:
    """Print a row, and return its error."""
    predicted_gib = predicted / common.GIB
    error = predicted_gib / measured_gib - 1
    found = f"{measured_gib:.2f}", f"{predicted_gib:.2f}", f"{error:+.1%}"
    common.print_row(source, what, slots, *found, note)
    return error


if __name__ == "__main__":
    main()
