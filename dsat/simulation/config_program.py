"""Training script for a model of which only the transformers configuration is known.

It runs only in simulations, in place of a user's script, and trains on random batches.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.batches import positions_of
from dsat.options import ALL_LINEAR
from dsat.simulation.versions.transformers_models import type_argument

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_USUAL_SEQUENCE = 2048
_USUAL_IMAGE, _CHANNELS = 224, 3
_AUDIO_SAMPLES, _MEL_FRAMES = 160_000, 3000  # 10 s at 16 kHz; Whisper's 30 s


class LowRank(torch.nn.Module):
    """Frozen linear layer with a trained low-rank part (LoRA, arXiv 2106.09685), as in PEFT."""

    def __init__(
        self, base: torch.nn.Module, rank: int, inputs: int, outputs: int, dropout: float
    ) -> None:
        super().__init__()
        self.base = base
        self.dropout = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
        dtype = next(base.parameters()).dtype
        self.down = torch.nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.up = torch.nn.Linear(rank, outputs, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


def add_lora(model: torch.nn.Module, settings: Mapping[str, str]) -> None:
    """Freeze a model in place and add trained low-rank parts to some of its layers.

    Args:
        settings: `r`, `dropout` and `target` (last parts of layer names, joined by +, or
            `all-linear`); each has a default.

    Raises:
        InvalidTrial: no layer has such a name.
    """
    targets = settings.get("target", "q_proj+v_proj").split("+")
    if targets == [ALL_LINEAR]:
        targets = _linear_layers(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    count = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            weight = getattr(layer, "weight", None)
            if name not in targets or weight is None or weight.dim() != 2:
                continue
            outputs, inputs = weight.shape
            if type(layer).__name__ == "Conv1D":  # transformers' own, of GPT-2: transposed
                outputs, inputs = inputs, outputs
            rank, dropout = int(settings.get("r", 8)), float(settings.get("dropout", 0))
            setattr(parent, name, LowRank(layer, rank, inputs, outputs, dropout))
            count += 1
    if not count:
        raise InvalidTrial(
            f"--lora: no layer is called {' or '.join(targets)}; there are "
            f"{', '.join(_linear_layers(model))}"
        )


def _linear_layers(model: Any) -> list[str]:
    """Return the last part of the name of each linear layer, except the output embedding."""
    output = model.get_output_embeddings()
    return sorted(
        {
            name.split(".")[-1]
            for name, layer in model.named_modules()
            if layer is not output
            and (isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D")
        }
    )


def build(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Build the model of a configuration file, in the class that it names or a suitable one.

    Raises:
        InvalidTrial: the installed transformers refuses the file, or has no such model.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, _configuration_file=path.name)
    except Exception as error:  # of any kind: each model checks its own
        reason = textwrap.shorten(str(error), 300) or type(error).__name__
        raise InvalidTrial(
            f"transformers {transformers.__version__} refuses {path.name}: {reason.strip(' .')}. "
            "Correct the file, install a version of transformers that supports the model, or give "
            "your training script instead of --model"
        ) from error
    config.use_cache = False
    type_args = type_argument(dtype)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])._from_config(config, **type_args)  # type: ignore[no-any-return]
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config(config, **type_args)  # type: ignore[no-any-return]
    raise InvalidTrial(
        f"transformers {transformers.__version__} has no model for {type(config).__name__}. Give "
        "your training script instead of --model"
    )


def batches(model: Any, sequence: int | None, dtype: torch.dtype) -> Callable[[int], Any]:
    """Return a function that makes a random batch for the model, given the number of samples.

    Raises:
        InvalidTrial: the model accepts no sequences of this length, or no sequences at all.
    """
    config, kind = model.config, type(model).__name__
    text = config.get_text_config()
    main = getattr(model, "main_input_name", "input_ids")
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    is_classifier = "Classification" in kind and "Token" not in kind
    longest = positions_of(text) or math.inf
    length = sequence or int(min(_USUAL_SEQUENCE, longest))
    if sequence and main == "pixel_values" and (is_classifier or not takes_labels):
        raise InvalidTrial(f"--seq-length: samples of {kind} are images, not sequences of tokens")
    if length > longest and _learns_positions(model, longest):
        raise InvalidTrial(
            f"--seq-length: {kind} has embeddings for {longest:,} positions, so it cannot train "
            f"on {length:,} tokens"
        )

    def tokens(samples: int) -> torch.Tensor:
        return torch.randint(0, text.vocab_size, (samples, length))

    def batch(samples: int) -> dict[str, torch.Tensor]:
        if main == "pixel_values":
            size = getattr(config, "image_size", _USUAL_IMAGE)
            height, width = size if isinstance(size, (list, tuple)) else (size, size)
            channels = getattr(config, "num_channels", _CHANNELS)
            inputs = {main: torch.randn(samples, channels, height, width, dtype=dtype)}
        elif main == "input_values":
            inputs = {main: torch.randn(samples, sequence or _AUDIO_SAMPLES, dtype=dtype)}
        elif main == "input_features":
            bins = getattr(config, "num_mel_bins", 80)
            frames = 2 * getattr(config, "max_source_positions", 0)  # Whisper's only length
            inputs = {
                main: torch.randn(samples, bins, frames or sequence or _MEL_FRAMES, dtype=dtype)
            }
        else:
            inputs = {"input_ids": tokens(samples)}
        if takes_labels:
            if is_classifier:
                inputs["labels"] = torch.randint(0, config.num_labels, (samples,))
            else:
                inputs["labels"] = tokens(samples)
        return inputs

    return batch


def _learns_positions(model: Any, number: float) -> bool:
    """Return whether a model learns an embedding of `number` positions; OPT has two more rows."""
    token_embedding = None
    # transformers raises this for models without token embeddings (Wav2Vec2).
    with contextlib.suppress(NotImplementedError):
        token_embedding = model.get_input_embeddings()
    return any(
        isinstance(layer, torch.nn.Embedding) and number <= layer.num_embeddings <= number + 2
        for layer in model.modules()
        if layer is not token_embedding
    )


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the model's own loss, or the mean of its first output if it has none."""
    loss = getattr(outputs, "loss", None)
    return outputs[0].float().mean() if loss is None else loss  # type: ignore[no-any-return]


def main() -> None:
    """Train on random batches without end."""
    import deepspeed

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--lora", type=json.loads)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--deepspeed_config")
    args = parser.parse_args()
    dtype = _DTYPES[args.dtype]
    # Like the Trainer, whose models stage 3 partitions while they are made.
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model: Any = build(args.model, dtype)
    if args.lora is not None:
        add_lora(model, args.lora)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        if args.lora is not None:
            model.enable_input_require_grads()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, config=args.deepspeed_config
    )
    batch = batches(model, args.seq_length, dtype)
    while True:
        inputs = batch(engine.train_micro_batch_size_per_gpu())
        loss = loss_of(engine(**{name: t.to(engine.device) for name, t in inputs.items()}))
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
