"""The closed form of memory against DeepSpeed's simulated engine: prints a table.

    python3 -m benchmarks.formula [--models NAME ...] [--slots N ...] [--gas N ...]

Each row is the peak of one rank with one sample, for one configuration. Models have the shapes of
Llama, in bf16 with Adam in fp32. The targets are errors of 3 % in the median and 10 % at worst.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import GIB, Bar
from dsat.command.ds_config import BATCH_KEYS
from dsat.estimating.options import EstimateSettings
from dsat.memory import closed_form
from dsat.memory.strategies import apply_strategy, compared
from dsat.prepare.simulated_model import simulate
from dsat.simulation.protocol import Question

SEQUENCE = 2048
LORA = {"r": "16", "target": "all-linear"}
MEDIAN, WORST = 0.03, 0.10
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)
MODELS: Mapping[str, Sequence[int]] = {
    "0.1 B": (768, 12, 12, 12, 2048, 32_000),
    "1 B": (2048, 16, 32, 8, 8192, 128_256),
    "8 B": (4096, 32, 32, 8, 14_336, 128_256),
    "32 B": (5120, 64, 40, 8, 27_648, 152_064),
    "70 B": (8192, 80, 64, 8, 28_672, 128_256),
}


@dataclass(frozen=True)
class Row:
    """A configuration, with its peak in bytes from the simulation and from the closed form."""

    name: str
    strategy: str
    slots: int
    gas: int
    simulated: int
    formula: int

    @property
    def error(self) -> float:
        return self.formula / self.simulated - 1


def main() -> None:
    """Print the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["0.1 B", "1 B", "8 B"])
    parser.add_argument("--slots", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--gas", nargs="*", type=int, default=[1, 4])
    args = parser.parse_args()
    found: list[Row] = []
    common.print_head("model", "strategy", "GPUs", "accumulation", "simulated", "formula", "error")
    for name, checkpointing, lora in itertools.product(args.models, ("on", "off"), (False, True)):
        for row in rows(name, checkpointing, args.slots, args.gas, lora=lora):
            sizes = (f"{size / GIB:.2f} GiB" for size in (row.simulated, row.formula))
            cells = (row.name, row.strategy, row.slots, row.gas, *sizes, f"{row.error:+.1%}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            found.append(row)
    common.print_bars(bars(found))


def rows(
    name: str, checkpointing: str, slots: Sequence[int], gas: Sequence[int], *, lora: bool = False
) -> Iterator[Row]:
    """Yield the rows of a model, without configurations that cannot be simulated."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(name)), encoding="utf-8")
        settings = EstimateSettings(
            model=folder,
            seq_length=SEQUENCE,
            activation_checkpointing=checkpointing,
            lora=LORA if lora else None,
        )
        with simulate(settings) as model:
            facts = model.simulator.facts(model.config)
            cases = list(itertools.product(compared(model.config), slots, gas))
            questions = [
                Question({**apply_strategy(model.config, s, n), BATCH_KEYS[2]: steps}, 1, n)
                for s, n, steps in cases
            ]
            answers = model.simulator.estimates(questions)
    label = f"{name}, checkpointing {checkpointing}{', LoRA' if lora else ''}"
    for (strategy, n, steps), asked, simulated in zip(cases, questions, answers, strict=True):
        if not isinstance(simulated, str):
            formula = closed_form.estimate(facts, asked.config, slots=n, micro_batch=1)
            yield Row(label, strategy.label, n, steps, simulated.peak, formula.peak)


def bars(found: Sequence[Row]) -> list[Bar]:
    """Return the targets for the errors, and whether they are met."""
    errors = [abs(row.error) for row in found]
    median, worst = statistics.median(errors), max(errors)
    return [
        Bar(f"off by at most {MEDIAN:.0%} in the median", f"{median:.1%}", median <= MEDIAN),
        Bar(f"off by at most {WORST:.0%} at worst", f"{worst:.1%}", worst <= WORST),
    ]


def _config(name: str) -> dict[str, Any]:
    sizes = dict(zip(_SIZES, MODELS[name], strict=True))
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {**kind, **sizes, "max_position_embeddings": 8192}


if __name__ == "__main__":
    main()
