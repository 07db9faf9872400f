"""Print predicted against published GPU memory.

    python3 -m benchmarks.published [--only WORD]

A table of docs/predicting.md. A model whose layers are published is simulated; of others the
closed form tells what their sizes decide. Published are peaks of what torch has allocated, if
nothing else is said.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from dsat.app.estimate import simulation_engine
from dsat.app.source import Source
from dsat.inputs import ds_config, entrypoint, experiment
from dsat.memory import closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import MemoryEstimate
from dsat.memory.simulation_client import Question, SimulationUnavailable, Simulator

FOLDER = Path(__file__).parent / "programs" / "published"
_MODELS = Path(__file__).parent / "models"
_TIMEOUT_S = 600.0
BAR = 0.03


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        source: where it was published.
        what: what was measured, a phase of the estimate or its `peak`.
        config: the DeepSpeed configuration.
        slots: data-parallel ranks.
        measured_gib: what was published.
        model: what is simulated: the words of its command; or the facts for the closed form,
            without activations, where they do not decide what was measured.
        micro_batch: its micro batch.
        note: what of the configuration is not published, and the reason of a miss.
        needs: module of DeepSpeed that came with what the configuration asks for.
    """

    source: str
    what: str
    config: Mapping[str, Any]
    slots: int
    measured_gib: float
    model: Sequence[str] | ModelFacts
    micro_batch: int = 1
    note: str = ""
    needs: str = "deepspeed"

    def predicted(self) -> MemoryEstimate:
        if isinstance(self.model, ModelFacts):
            return closed_form.estimate(
                self.model, self.config, slots=self.slots, micro_batch=self.micro_batch
            )
        return _simulated(self.model, self.config, self.slots, self.micro_batch)


def _simulated(
    words: Sequence[str], config: Mapping[str, Any], slots: int, micro_batch: int
) -> MemoryEstimate:
    micro = {"train_micro_batch_size_per_gpu": micro_batch}
    whole = {"gradient_accumulation_steps": 1, **config, **micro}
    user = experiment.of_command(list(words), "published", FOLDER, whole, "the row")
    source = Source(user, entrypoint.parse(list(words), FOLDER))
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(simulation_engine(source, Path(folder), _TIMEOUT_S)) as engine,
        Simulator(engine, as_cpu=False, timeout_s=_TIMEOUT_S) as simulator,
    ):
        [found] = simulator.estimates([Question(whole, micro_batch, slots)])
    if isinstance(found, str):
        raise SimulationUnavailable(found)
    return found


def _facts(num_params: int, trainable: int | None = None, largest: int = 0) -> ModelFacts:
    trained = num_params if trainable is None else trainable
    return ModelFacts(num_params, trained, largest, 0.0, 0.0, 0.0)


def _post_norm(width: int, layers: int, heads: int, vocabulary: int, *more: str) -> list[str]:
    sizes = {"width": width, "layers": layers, "heads": heads, "vocabulary": vocabulary}
    words = [f"--{name}={size}" for name, size in {**sizes, "length": 512}.items()]
    return ["python3", "post_norm.py", "--deepspeed_config=ds_config.json", *words, *more]


_MASTER_WEIGHTS = "DeepSpeedExamples training/bf16_master_weight"
_ADAMW: Mapping[str, Any] = {"type": "AdamW", "params": {"lr": 1e-4}}
_STAGE_3: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer": _ADAMW,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5 * 10**7,
        "stage3_param_persistence_threshold": 0,
    },
}
_ALL_BF16: Mapping[str, Any] = {
    **_STAGE_3,
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"},
}
# DeepSpeed replaced `linear` in stage 3 only within `zero.Init` until partition_parameters.py:1090
# (0.19.8): what was gathered stayed in memory with the activations, which had views of it.
_KEPT_WEIGHTS: Mapping[str, Any] = {"zero_optimization": {"memory_efficient_linear": False}}
_OLDER = "with `memory_efficient_linear: false`, as DeepSpeed then was without zero.Init"
_OF_ALL_BF16, _OF_ULYSSES = (
    f"deepspeed.runtime.{name}" for name in ("torch_autocast", "sequence_parallel.ulysses_sp")
)
_LARGE = _post_norm(4096, 32, 32, 50257)
_SMALL = _post_norm(1024, 12, 16, 50000)
_ULYSSES = "huggingface.co/blog/ulysses-sp, Qwen3-4B, "
_NOT_OFFLOADED = (
    "optimizer states on the cards: the post says on the host, but its row of one card has 16 "
    "bytes for each parameter"
)


def _recomputed(model: str, tokens: int) -> list[str]:
    """Return the words that train a model of a configuration on sequences of so many tokens."""
    words = ["python3", "-m", "dsat.in_trial.simulation.config_program", "--gradient-checkpointing"]
    words += ["--deepspeed_config=ds_config.json", f"--hf-config={_MODELS / model}"]
    return [*words, f"--seq-length={tokens}"]


_LAYERS = 36  # of Qwen3-8B, whose q_proj is 4096 x 4096 and v_proj 1024 x 4096
_ADAPTERS = _LAYERS * 16 * ((4096 + 4096) + (4096 + 1024))
ROWS = (
    *(
        Row(
            f"{_MASTER_WEIGHTS}, {name}",
            "peak",
            ds_config.merge(config, _KEPT_WEIGHTS if note else {}),
            slots,
            gib,
            words,
            micro_batch,
            note,
            _OF_ALL_BF16 if config is _ALL_BF16 else "deepspeed",
        )
        for name, config, slots, gib, words, micro_batch, note in (
            ("6.86 B, recomputed", _STAGE_3, 4, 31.38, [*_LARGE, "--recompute"], 1, ""),
            (
                "6.86 B, recomputed, all in bf16",
                _ALL_BF16,
                4,
                18.93,
                [*_LARGE, "--recompute"],
                1,
                "",
            ),
            ("6.86 B", _STAGE_3, 4, 41.28, _LARGE, 1, _OLDER),
            ("6.86 B, all in bf16", _ALL_BF16, 4, 33.20, _LARGE, 1, _OLDER),
            ("254 M", _STAGE_3, 1, 5.93, _SMALL, 4, _OLDER),
            ("254 M, all in bf16", _ALL_BF16, 1, 5.73, _SMALL, 4, _OLDER),
            ("254 M", _STAGE_3, 4, 3.57, _SMALL, 4, _OLDER),
            ("254 M, all in bf16", _ALL_BF16, 4, 4.44, _SMALL, 4, _OLDER),
        )
    ),
    *(
        Row(
            f"{_ULYSSES}{tokens} tokens",
            "peak",
            {
                "bf16": {"enabled": True},
                "optimizer": _ADAMW,
                "zero_optimization": {"stage": 3},
                "sequence_parallel_size": slots,
                "gradient_accumulation_steps": 8,
            },
            slots,
            gib,
            _recomputed("qwen3-4b.json", tokens),
            note=_NOT_OFFLOADED,
            needs=_OF_ULYSSES if slots > 1 else "deepspeed",
        )
        for tokens, slots, gib in (
            (8192, 1, 76.4),
            (8192, 4, 23.4),
            (32768, 4, 35.0),
            (65536, 4, 50.5),
            (98304, 4, 66.0),
        )
    ),
    Row(
        "deepspeedai/DeepSpeed#8029, Qwen3-8B with LoRA",
        "init",
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        1,
        15.36,
        _facts(8_190_735_360 + _ADAPTERS, _ADAPTERS, largest=4096 * 16),
        note="after initialisation",
    ),
)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it is in
        return False


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose source has this")
    word, numbers = parser.parse_args().only, ("slots", "measured GiB", "predicted GiB", "error")
    common.print_head("source", "what", *numbers, "note", numbers=numbers)
    for row in (row for row in ROWS if word in row.source):
        if not _is_there(row.needs):
            print(f"{row.source}: the installed DeepSpeed has no {row.needs}", file=sys.stderr)
            continue
        try:
            predicted_gib = float(getattr(row.predicted(), row.what)) / common.GIB
        except SimulationUnavailable as reason:
            print(f"{row.source}: {reason}", file=sys.stderr)
            continue
        error = predicted_gib / row.measured_gib - 1
        within = "" if abs(error) <= BAR else " (beyond the bar)"
        found = f"{row.measured_gib:.2f}", f"{predicted_gib:.2f}", f"{error:+.1%}{within}"
        common.print_row(row.source, row.what, row.slots, *found, row.note)


if __name__ == "__main__":
    main()
