"""Simulations of the script's model, and the stand-in engine that the script gets for it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils import weak

from dsat.command import ds_config
from dsat.command.ds_config import BATCH_KEYS
from dsat.in_trial import config_injection, script_switches
from dsat.in_trial.batches import longest_of
from dsat.in_trial.profiler import hidden_size
from dsat.memory.estimate import select_memory_settings
from dsat.simulation.captured import Captured, ModuleSnapshot
from dsat.simulation.known_values import ValuesMode
from dsat.simulation.operands import tensors_in
from dsat.simulation.patches import for_fake_cpu
from dsat.simulation.protocol import Question, ScriptFacts, SimulationUnsupported
from dsat.simulation.simulation import ActivationPass, Simulation
from dsat.simulation.storage_tracker import StorageTracker

_TOKENS_DIM = 2  # samples and tokens
_PRECISIONS = ("bf16", "bfloat16", "fp16")
# Settings that affect a script before its first step: batch sizes, data types, data, schedules.
_BEFORE_STEPS = (
    *BATCH_KEYS,
    *_PRECISIONS,
    *("curriculum_learning", "data_efficiency", "dataloader_drop_last", "gradient_clipping"),
    *("scheduler", "torch_autocast"),
)
# Suffixes of precision settings that concern the optimizer state; DeepSpeed refuses these settings
# in stage 0.
_OF_STATE = ("_master_weights_and_grads", "_optimizer_states")
End = Callable[[Mapping[str, Any]], None]


class BorrowedModel:
    """The arguments that a script passes to `deepspeed.initialize`, used to simulate its model.

    Attributes:
        earlier: all tensors of the process when the script called `deepspeed.initialize`.
        uses_zero_init: whether stage 3 partitions parameters while the script makes them.

    Raises:
        SimulationUnsupported: the model is a pipeline.
    """

    def __init__(
        self, initialize: Callable[..., Any], arguments: dict[str, Any], config: Mapping[str, Any]
    ) -> None:
        model = arguments["model"]
        if type(model).__name__ == "PipelineModule":
            raise SimulationUnsupported("pipeline parallelism")
        parameters = arguments.get("model_parameters")
        if parameters is not None and not isinstance(parameters, torch.Tensor):
            arguments["model_parameters"] = list(parameters)
        self.uses_zero_init = False
        self._initialize = initialize
        self._arguments = config_injection.drop_config(arguments)
        self._config = config
        self._snapshot = ModuleSnapshot(model)
        self._after_forward: dict[str, Callable[..., Any]] = {}
        self.earlier = weak.WeakTensorKeyDictionary()
        for obj in gc.get_objects():
            # By type: `isinstance` reads attributes of lazily loaded objects.
            if issubclass(type(obj), torch.Tensor):
                self.earlier[obj] = None

    def engine_for_the_script(self) -> Any:
        """Call `deepspeed.initialize` for stage 0 with SGD, on fake parameters; return its result.

        Afterwards the model has its own tensors again, in the data type that DeepSpeed trains.
        """
        config = _make_stand_in_config(self._config)
        tracker = StorageTracker("cpu")
        with for_fake_cpu(tracker), ValuesMode(), tracker:
            fakes = self._snapshot.put_fakes("cpu")
            source = self._arguments.get("model_parameters")
            if source is None:
                source = getattr(self._arguments.get("optimizer"), "param_groups", None)
            parameters = _plain_list(
                self._snapshot.module.parameters() if source is None else source
            )
            trained = [fakes.get(id(parameter), parameter) for parameter in parameters]
            result = self._initialize(
                **{
                    **self._arguments,
                    "config": config,
                    "optimizer": torch.optim.SGD(trained, lr=1e-3),
                    "model_parameters": None,
                }
            )
        self._snapshot.put_back(fakes)
        self._engine = result[0]
        accelerator = get_accelerator()
        is_cpu = accelerator.device_name() == "cpu"
        self._engine.device = torch.device("cpu" if is_cpu else accelerator.device_name(0))
        return result

    def on_first_training_forward(self, serve: Callable[..., Any]) -> None:
        """Call `serve(args, kwargs)` in place of the engine's first forward pass in training.

        This pass also sets what the engine's `backward` and `step` do. They look it up only when
        called, since in `engine.backward(engine(batch))` Python reads `engine.backward` first.
        """
        engine, original = self._engine, self._engine.forward
        self._after_forward = dict.fromkeys(("backward", "step"), _refuse_without_forward)
        for name in self._after_forward:
            setattr(engine, name, self._defer(name))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and engine.training:
                return serve(args, kwargs)
            return original(*args, **kwargs)

        engine.forward = forward

    def _defer(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._after_forward[name](*args, **kwargs)

    def capture(self, args: Any, kwargs: Mapping[str, Any]) -> ScriptFacts:
        """Record the script's first batch for candidates, and return the facts for the client."""
        model, batch = self._arguments["model"], [args, dict(kwargs)]
        micro_batch, packed_length = self._samples(batch)
        length = _sequence_length(batch)
        self._captured = Captured(
            initialize=self._initialize,
            arguments=self._arguments,
            snapshot=self._snapshot,
            micro_batch=micro_batch,
            follows_config=micro_batch == self._config.get("train_micro_batch_size_per_gpu"),
            packed_length=packed_length,
            sequence_length=None if packed_length else length,
            on_host={  # a forked process cannot read a device
                id(tensor): tensor.cpu()
                for tensor in tensors_in(batch)
                if tensor.device.type != "cpu" and not tensor.dtype.is_floating_point
            },
            uses_zero_init=self.uses_zero_init,
            # If the batch itself is older than the engine, age cannot distinguish other tensors.
            earlier=() if any(t in self.earlier for t in tensors_in(batch)) else self.earlier,
        )
        size = max((p.element_size() for p in model.parameters()), default=4)
        return ScriptFacts(
            sequence_length=length,
            model_takes=longest_of(model),
            is_quadratic=is_quadratic(model),
            sizes={
                **self._snapshot.sizes(),
                "param_bytes": size,
                "uses_zero_init": self.uses_zero_init,
                "hidden_size": hidden_size(model),
            },
            optimizer=self.optimizer(),
        )

    def optimizer(self) -> dict[str, Any]:
        """Return an `optimizer` section for the optimizer that the script passes; empty if none.

        The type is Adam for DeepSpeed's Adam, and for torch's Adam and AdamW unless they use
        `amsgrad` or `foreach=False`. `torch_adam` is true for torch's optimizers, unless they are
        fused. For other optimizers, the type is the full name of the class.
        """
        optimizer = self._arguments.get("optimizer")
        if optimizer is None:
            return {}
        kind, defaults = type(optimizer), getattr(optimizer, "defaults", {})
        is_usual = not defaults.get("amsgrad") and defaults.get("foreach") is not False
        is_torch_adam = is_usual and kind in (torch.optim.Adam, torch.optim.AdamW)
        if is_torch_adam or kind.__module__.startswith("deepspeed.ops.adam."):
            several = is_torch_adam and not defaults.get("fused")  # makes temporary copies
            return {"type": "Adam", "params": {"torch_adam": several}}
        return {"type": f"{kind.__module__}.{kind.__qualname__}"}

    def begin(self, request: Mapping[str, Any], args: Any, kwargs: Any, end: End) -> Any:
        """Simulate a candidate up to and including the script's forward pass; return its outputs.

        Args:
            request: the fields of `Question`, and others; `switches` are set on the model.
            args, kwargs: the script's batch.
            end: called with the result at the end of the script's micro step.
        """
        candidate = Question(**{name: request[name] for name in Question._fields})
        if candidate.switches:
            switch = functools.partial(script_switches.switch_model, targets=candidate.switches)
            self._snapshot.change(switch)
        captured = self._captured
        config = select_memory_settings(ds_config.fill_in_auto(candidate.config, self._config))
        kind = ActivationPass if candidate.activations_only else Simulation
        run = kind(captured, candidate._replace(config=config))
        has_gradients: list[bool] = []
        numbers = run.rules.numbers  # replaced only while the script computes its loss

        def watched(outputs: Any) -> Any:
            numbers.update(captured.numbers_for(candidate, outputs))
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    hook = lambda _: has_gradients.append(True)  # noqa: E731
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            return outputs

        def script_forward(*args: Any, **kwargs: Any) -> Any:
            # A pass before any backward pass belongs to this micro step: pairs, or two losses.
            if has_gradients:
                return script_step()
            numbers.clear()
            return watched(run.forward_again(*run.fakes_of((args, kwargs))))

        def script_backward(*args: Any, **kwargs: Any) -> None:
            numbers.clear()
            run.backward(*args, **kwargs)
            script_step()

        def script_step(*_: Any, **__: Any) -> None:
            numbers.clear()
            run.step()
            end(run.result())

        outputs = watched(run.forward(*run.fakes_of((args, kwargs))))
        engine = self._engine
        run.become(engine)
        engine.backward, engine.step, engine.forward = script_backward, script_step, script_forward
        self._after_forward.update(backward=script_backward, step=script_step)
        return outputs

    def _samples(self, batch: Any) -> tuple[int, int]:
        """Return a batch's number of samples, and the length of its packed row; 0 if not packed."""
        micro_batch = int(self._config.get("train_micro_batch_size_per_gpu", 1))
        shapes = [t.shape for t in tensors_in(batch) if t.dim() > 0]
        sizes = [shape[0] for shape in shapes]
        if not sizes or any(size % micro_batch == 0 for size in sizes):
            return micro_batch, 0
        rows = [shape[1] for shape in shapes if len(shape) > 1 and shape[0] == 1]
        lengths = [length for length in rows if length % micro_batch == 0]
        if lengths and len(lengths) == len(rows):
            return micro_batch, max(lengths)
        return max(set(sizes), key=sizes.count), 0


def _sequence_length(batch: Any) -> int | None:
    """Return the tokens per sample: columns of the first integer matrix; None without one."""
    for tensor in tensors_in(batch):
        if tensor.dim() == _TOKENS_DIM and tensor.dtype in (torch.int32, torch.int64):
            return int(tensor.shape[1])
    return None


def is_quadratic(model: torch.nn.Module) -> bool:
    """Return whether a transformers model stores values for pairs of tokens.

    These are scores of eager attention, and biases by relative position, as in T5.
    """
    if any(name.endswith("relative_attention_bias") for name, _ in model.named_modules()):
        return True
    configs = (getattr(module, "config", None) for module in model.modules())
    with_heads = (config for config in configs if getattr(config, "num_attention_heads", 0))
    return getattr(next(with_heads, None), "_attn_implementation", None) == "eager"


def _refuse_without_forward(*_: Any, **__: Any) -> None:
    raise SimulationUnsupported(
        "the script calls its model itself, and not the engine that deepspeed.initialize returns"
    )


def _make_stand_in_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the stand-in engine: stage 0 and `_BEFORE_STEPS`."""
    content = {key: config[key] for key in _BEFORE_STEPS if key in config}
    for key in _PRECISIONS:
        if isinstance(content.get(key), Mapping):
            content[key] = {k: v for k, v in content[key].items() if not k.endswith(_OF_STATE)}
    return {**content, "zero_optimization": {"stage": 0}}


def _plain_list(trained: Any) -> list[torch.Tensor]:
    """Return the parameters in a list of parameters or of parameter groups."""
    if isinstance(trained, torch.Tensor):
        return [trained]
    if isinstance(trained, Mapping):
        return _plain_list(trained["params"])
    return [parameter for part in trained for parameter in _plain_list(part)]
