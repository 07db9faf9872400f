"""Predicted memory and speed of well-known models on common machines: a page, a CSV, a JSON file.

    python3 -m benchmarks.gallery [--models NAME ...]

`make gallery` writes them into docs/gallery/ and docs/gallery.md. Each model is simulated once,
from its configuration in benchmarks/models/, at 4,096 tokens with recomputed activations. The
memory of every row follows from this by the closed form. For the speed, one step is traced of each
strategy that is the first to fit a machine. Nothing was measured. With --models, rows of other
models stay unchanged.
"""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import GIB, ROOT
from dsat.command import ds_config
from dsat.estimating.options import EstimateSettings
from dsat.estimating.tables import needed_bytes
from dsat.memory import closed_form
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Basis, MemoryModel
from dsat.memory.strategies import apply_strategy, compared
from dsat.options import LORA
from dsat.prepare.simulated_model import simulate
from dsat.projecting.projector import Projector
from dsat.projecting.tracing import Traced, trace
from dsat.search.gpus import GpuModel, find
from dsat.space.batch_rule import LARGEST_MICRO_BATCH
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy

CONFIGS = Path(__file__).parent / "models"
PAGE, FOLDER = ROOT / "docs" / "gallery.md", ROOT / "docs" / "gallery"
TEMPLATE = Path(__file__).with_name("gallery_page.md")
SEQUENCE = 4096
SLOTS = 8  # simulated data-parallel ranks
PREDICTED = "predicted"
_EVERY_LAYER = "r=16,target=q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"


@dataclass(frozen=True)
class Model:
    """A model of the gallery.

    Attributes:
        source: repository on the Hugging Face hub whose config.json has these values.
        params: number of parameters in the weights published there.
        lora: adapters, which are then the only trained parameters; empty for full fine-tuning.
    """

    file: str
    source: str
    params: int
    lora: str = ""


MODELS = {
    "Llama 2 7B": Model("llama-2-7b", "meta-llama/Llama-2-7b-hf", 6_738_415_616),
    "Mistral 7B": Model("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", 7_241_732_096),
    "LLaVA 1.5 7B": Model("llava-1.5-7b", "llava-hf/llava-1.5-7b-hf", 7_063_427_072),
    "Llama 3.1 8B": Model("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 8_030_261_248),
    "Qwen3 8B": Model("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360),
    "Llama 2 13B": Model("llama-2-13b", "meta-llama/Llama-2-13b-hf", 13_015_864_320),
    "Qwen3 14B": Model("qwen3-14b", "Qwen/Qwen3-14B", 14_768_307_200),
    "Qwen3 30B-A3B": Model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 30_532_122_624),
    "Qwen2.5 32B": Model("qwen2.5-32b", "Qwen/Qwen2.5-32B", 32_763_876_352),
    "Mixtral 8x7B": Model("mixtral-8x7b-v0.1", "mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
    "Llama 3.1 70B": Model("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 70_553_706_496),
    "Llama 3.1 70B, LoRA": Model(
        "llama-3.1-70b", "meta-llama/Llama-3.1-70B", 70_553_706_496, lora=_EVERY_LAYER
    ),
}
# Name -> number of GPUs, GiB of each, and their name in the table of GPUs (8 GPUs per host).
MACHINES = {
    "1 x 24 GB (RTX 4090)": (1, 24, "RTX-4090"),
    "8 x A100-40": (8, 40, "A100-40GB"),
    "8 x A100-80": (8, 80, "A100-80GB"),
    "8 x H100": (8, 80, "H100"),
    "4 x 8 H100": (32, 80, "H100"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy of one model on one machine.

    Attributes:
        status: `predicted`.
        tier: how memory was predicted.
        gpu_gib, host_gib: GPU memory that a micro batch of one sample needs, and host memory per
            GPU.
        largest_micro_batch: 0 if not even one sample fits.
        longest_sequence: tokens of one sample that fits, if activations are proportional to them.
        tokens_per_second, low, high: speed over all GPUs at the largest micro batch, and its 90 %
            interval; None unless the strategy is the machine's first.
        source: source of the model's configuration.
        command: a command that prints the row's memory and largest micro batch.
    """

    model: str
    machine: str
    strategy: str
    status: str
    tier: str
    sequence: int
    gpu_gib: float | None
    host_gib: float | None = None
    largest_micro_batch: int
    longest_sequence: int | None = None
    tokens_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    source: str
    command: str = ""

    @property
    def fits(self) -> bool:
        return self.largest_micro_batch > 0


def main() -> None:
    """Write the page and its tables."""
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    rows: dict[str, list[Row]] = {}
    for row in known():
        rows.setdefault(row.model, []).append(row)
    for name in args.models:
        rows[name] = list(predicted(name, MODELS[name]))
        ordered = [row for key in sorted(rows, key=_order) for row in rows[key]]
        write_tables(ordered, FOLDER)
        PAGE.write_text(page(ordered), encoding="utf-8")


def known() -> list[Row]:
    """Return the rows of the existing table."""
    path = FOLDER / "gallery.json"
    return [Row(**each) for each in json.loads(path.read_text())] if path.exists() else []


def _order(model: str) -> int:
    return list(MODELS).index(model) if model in MODELS else -1


def predicted(name: str, model: Model) -> Iterator[Row]:
    """Yield the rows of a model, which is simulated once.

    Raises:
        RuntimeError: its configuration gives another number of parameters than was published.
    """
    path = CONFIGS / f"{model.file}.json"
    traced = _traced(path, model)
    facts = traced.facts
    if facts.num_params - (facts.trainable_params if model.lora else 0) != model.params:
        raise RuntimeError(f"{path} makes {facts.num_params:,} parameters, not {model.params:,}")
    for machine, fits in _memory(facts, traced.base):
        gpus, gib, gpu = MACHINES[machine]
        first = _first(fits)
        for strategy, fit in fits.items():
            speed: dict[str, float] = {}
            if strategy == first and strategy in traced.traces:
                speed = _speed(traced, find(gpu), strategy, gpus, int(fit.most))
            yield Row(
                model=name,
                machine=machine,
                strategy=strategy.label,
                status=PREDICTED,
                tier="closed form of the simulated model",
                sequence=SEQUENCE,
                gpu_gib=round(fit.gpu_bytes / GIB, 2),
                host_gib=round(fit.host_bytes / GIB, 2) if fit.host_bytes else None,
                largest_micro_batch=int(fit.most),
                longest_sequence=int(SEQUENCE * fit.most) if fit.most > 0 else None,
                source=model.source,
                command=_command(path, model, gpus, gib),
                **speed,
            )


def _traced(path: Path, model: Model) -> Traced:
    """Trace a step of each strategy that is the first to fit a machine."""
    lora = LORA.read(model.lora) if model.lora else None
    settings = EstimateSettings(
        model=str(path), seq_length=SEQUENCE, activation_checkpointing="on", lora=lora
    )

    def firsts(found: Traced) -> list[Strategy]:
        first = [_first(fits) for _, fits in _memory(found.facts, found.base)]
        return list(dict.fromkeys(strategy for strategy in first if strategy is not None))

    with simulate(settings) as simulated:
        traced = trace(simulated, SLOTS, firsts)
    for strategy, reason in traced.failures.items():
        print(f"{path.stem}, {strategy}: has no speed: {reason}", file=sys.stderr)
    return traced


def _first(fits: Mapping[Strategy, _Fit]) -> Strategy | None:
    """Return the first strategy that fits, preferably one without offloading."""
    return next((s for s in sorted(fits, key=_offloads) if fits[s].most >= 1), None)


def _offloads(one: Row | Strategy) -> bool:
    """Return whether a strategy offloads, which costs speed."""
    return " on cpu" in (one.strategy if isinstance(one, Row) else one.label)


@dataclass(frozen=True)
class _Fit:
    """Memory in bytes of a strategy on a machine; `most` is the largest micro batch."""

    gpu_bytes: int
    host_bytes: int
    most: float


def _memory(
    facts: ModelFacts, base: Mapping[str, Any]
) -> Iterator[tuple[str, dict[Strategy, _Fit]]]:
    """Yield each machine with the memory of each strategy."""
    basis = Basis.of_model(facts)
    for machine, (gpus, gib, _) in MACHINES.items():
        fits = {}
        for strategy in compared(base):
            config = apply_strategy(base, strategy, gpus)
            memory = MemoryModel(basis, slots=gpus, limit_bytes=gib * GIB, on_device=True)
            host = closed_form.estimate(facts, config, slots=gpus, micro_batch=1).host
            most = min(memory.largest(memory.shape(config, {})), float(LARGEST_MICRO_BATCH))
            fits[strategy] = _Fit(needed_bytes(basis, config, gpus), host, most)
        yield machine, fits


def _speed(
    traced: Traced, gpu: GpuModel, strategy: Strategy, gpus: int, micro_batch: int
) -> dict[str, float]:
    """Return tokens/s over all GPUs without accumulation, with the ends of the interval."""
    base = {**ds_config.drop_batch_sizes(traced.base), ds_config.BATCH_KEYS[0]: gpus * micro_batch}
    projector = Projector(replace(traced, base=base), gpu, None)
    row = projector.row(strategy, gpus, micro_batch)
    if row is None:
        return {}
    tokens, (low, high) = SEQUENCE * row.samples_per_second, row.spread
    ends = {"tokens_per_second": tokens, "low": tokens * low, "high": tokens * high}
    return {name: float(f"{number:.3g}") for name, number in ends.items()}


def _command(path: Path, model: Model, gpus: int, gib: int) -> str:
    words = ["dsat", "estimate", "--model", str(path.relative_to(ROOT))]
    words += ["--seq-length", str(SEQUENCE), "--activation-checkpointing", "on"]
    words += ["--lora", model.lora] if model.lora else []
    return shlex.join([*words, "--devices", str(gpus), "--slot-memory", f"{gib}GiB"])


def write_tables(rows: Sequence[Row], folder: Path) -> None:
    """Write all rows as CSV and as JSON."""
    with (folder / "gallery.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    text = json.dumps([asdict(row) for row in rows], indent=1)
    (folder / "gallery.json").write_text(f"{text}\n", encoding="utf-8")


def page(rows: Sequence[Row]) -> str:
    """Return the text of the page."""
    numbers = ("memory of a GPU", "largest micro batch", "longest sequence", "tokens/s")
    heads = ("model", "machine", "strategy", *numbers, "")
    shown = []
    for name in dict.fromkeys(row.model for row in rows):
        for machine in MACHINES:
            own = [row for row in rows if (row.model, row.machine) == (name, machine)]
            first = next((row for row in sorted(own, key=_offloads) if row.fits), None)
            shown.append(_shown(first) if first else (name, machine, "does not fit", *[""] * 5))
    table = Table(heads, shown, numbers=numbers).markdown()
    commands = [row.command for row in rows if row.model == "Llama 3.1 8B"]
    example = commands[0] if commands else rows[0].command
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.format(sequence=SEQUENCE, table="\n".join(table), example=example)


def _shown(row: Row) -> tuple[str, ...]:
    host = f", {row.host_gib:.0f} GiB of the host" if row.host_gib else ""
    speed = "-"
    if row.tokens_per_second is not None:
        speed = f"{row.tokens_per_second:,.0f} ({row.low:,.0f} to {row.high:,.0f})"
    return (
        *(row.model, row.machine, row.strategy),
        "-" if row.gpu_gib is None else f"{row.gpu_gib:.1f} GiB{host}",
        str(row.largest_micro_batch),
        "-" if row.longest_sequence is None else f"{row.longest_sequence:,}",
        *(speed, row.status),
    )


if __name__ == "__main__":
    main()
