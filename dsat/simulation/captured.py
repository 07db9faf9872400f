"""Model and batch that the script passes to DeepSpeed, and fake tensors in place of the model's."""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsat.simulation.fake_parameters import assign
from dsat.simulation.operands import tensors_in
from dsat.simulation.protocol import Question

_HOOKS = tuple(name for name in vars(torch.nn.Module()) if "_hooks" in name)


@dataclass(frozen=True)
class Captured:
    """Model and batch that the script passes to DeepSpeed.

    Attributes:
        initialize: DeepSpeed's own `deepspeed.initialize`.
        arguments: arguments of that call by name, without the configuration.
        snapshot: the model as the script passed it.
        micro_batch: number of samples in the script's first batch.
        follows_config: whether `micro_batch` is the one in the script's configuration.
        packed_length: length of the one row that holds all samples; 0 if samples are not packed.
        sequence_length: tokens per sample; None for packed samples, and for other data than tokens.
        on_host: copies of the batch's integers on a device, by the `id` of the original.
        uses_zero_init: whether stage 3 partitions parameters while the script makes them.
        earlier: tensors older than the engine; empty if the batch is among them.
    """

    initialize: Callable[..., Any]
    arguments: Mapping[str, Any]
    snapshot: ModuleSnapshot
    micro_batch: int
    follows_config: bool
    packed_length: int
    sequence_length: int | None
    on_host: Mapping[int, torch.Tensor]
    uses_zero_init: bool
    earlier: Container[torch.Tensor]

    def shape_for(self, candidate: Question, tensor: torch.Tensor) -> list[int]:
        """Return a tensor's shape on one rank of a candidate, by its micro batch and parallelism.

        A tensor older than the engine counts as batch data only if it has exactly one row for each
        sample. A tensor of class weights, for example, has a different number of rows.
        """
        shape = tensor.shape
        length = self.packed_length // self.micro_batch or self.sequence_length or 0
        rank_length = -(-length // candidate.parallelism.sequence)
        if self.packed_length:
            packed_length = rank_length * candidate.micro_batch
            return [packed_length if size == self.packed_length else size for size in shape]
        samples, rest = divmod(shape[0], self.micro_batch)
        rest = rest or (samples != 1 and tensor in self.earlier)
        first = shape[0] if rest else samples * candidate.micro_batch
        # A tensor without a row per sample has a token dimension only if it holds positions, in one
        # row or one dimension.
        is_of_tokens = not rest or shape[0] == 1 or len(shape) == 1
        sizes = [first, *shape[1:]]
        place = min(1, len(shape) - 1)
        if is_of_tokens and sizes[place] == self.sequence_length:
            sizes[place] = rank_length
        return sizes

    def numbers_for(self, candidate: Question, outputs: Any) -> dict[int, int]:
        """Map integers to replace between the forward and the backward pass to their new values.

        A loss may contain the number of samples, or twice that number for two views of each. An
        integer that is also the size of another dimension of the outputs is not replaced.
        `CAPTURED_MICRO_BATCH` is a number that hardly occurs otherwise.
        """
        if not self.follows_config:
            return {}
        other_sizes = {size for tensor in tensors_in(outputs) for size in tensor.shape[1:]}
        micro_batch = candidate.micro_batch
        numbers = {views * self.micro_batch: views * micro_batch for views in (1, 2)}
        return {old: new for old, new in numbers.items() if old not in (*other_sizes, micro_batch)}


def repeated(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of the batch in another shape, with its values repeated or cut off."""
    for dim, (size, new_size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size != new_size:
            tensor = tensor.index_select(dim, torch.arange(new_size) % size)
    return tensor


@dataclass(frozen=True)
class _Form:
    """Properties of a tensor, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return cls(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, is_parameter, tensor.requires_grad
        )

    def fake(self, device: str, floating: torch.dtype | None = None) -> torch.Tensor:
        """Make a tensor of this form in the active fake mode; `floating` replaces float types."""
        dtype = floating if floating and self.dtype.is_floating_point else self.dtype
        tensor = torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)
        if not self.is_parameter:
            return tensor
        return torch.nn.Parameter(tensor, requires_grad=self.requires_grad)


class ModuleSnapshot:
    """A module's tensors and hooks before DeepSpeed changes them, for replacing and restoring."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._modules = list(module.modules())
        self._hooks = self._hooks_now()
        self._places = [
            (module, kind, name, tensor)
            for kind in ("_parameters", "_buffers")
            for module in self._modules
            for name, tensor in vars(module)[kind].items()
        ]
        self._tensors = {id(t): t for *_, t in self._places if t is not None}
        self._forms = {key: _Form.of(tensor) for key, tensor in self._tensors.items()}
        devices = [t.device.type for t in self._tensors.values()]
        self.on_device = any(device not in ("cpu", "meta") for device in devices)

    def put_fakes(
        self, device: str, floating: torch.dtype | None = None
    ) -> dict[int, torch.Tensor]:
        """Restore the module's hooks, and put fake tensors in place of its tensors.

        Returns:
            The fakes by the `id` of the tensor that each replaces.
        """
        fakes = {key: form.fake(device, floating) for key, form in self._forms.items()}
        self._put(fakes)
        self._put_hooks()
        return fakes

    def change(self, change: Callable[[torch.nn.Module], None]) -> None:
        """Let a function change the module's hooks and attributes, and record the hooks."""
        self._put_hooks()
        change(self.module)
        self._hooks = self._hooks_now()

    def put_back(self, fakes: Mapping[int, torch.Tensor]) -> None:
        """Restore the module's own tensors, converted to the types of their fakes."""
        for key, tensor in self._tensors.items():
            if fakes[key].dtype != tensor.dtype:
                assign(tensor, tensor.detach().to(fakes[key].dtype))
        self._put(self._tensors)

    def _hooks_now(self) -> list[dict[str, Any]]:
        return [{name: copy.copy(m.__dict__[name]) for name in _HOOKS} for m in self._modules]

    def _put_hooks(self) -> None:
        for module, hooks in zip(self._modules, self._hooks, strict=True):
            for name, functions in hooks.items():
                module.__dict__[name] = copy.copy(functions)

    def _put(self, tensors: Mapping[int, torch.Tensor]) -> None:
        for module, kind, name, tensor in self._places:
            vars(module)[kind][name] = None if tensor is None else tensors[id(tensor)]

    def sizes(self) -> dict[str, int]:
        """Return the numbers of elements of the parameters, as fields of `ModelFacts`."""
        forms = [form for form in self._forms.values() if form.is_parameter]
        # DeepSpeed's AutoTP (0.19.8) divides linear layers.
        undivided_ids = {
            id(t) for module, *_, t in self._places if not isinstance(module, torch.nn.Linear)
        }
        undivided = [form for key, form in self._forms.items() if key in undivided_ids]
        trained = sorted(math.prod(form.shape) for form in forms if form.requires_grad)
        cumulated, num_trained = (
            zip(trained, itertools.accumulate(trained), strict=True),
            sum(trained),
        )
        return {
            "num_params": sum(math.prod(form.shape) for form in forms),
            "trainable_params": num_trained,
            "largest_param": max(trained, default=0),
            "usual_param": next((size for size, total in cumulated if 2 * total >= num_trained), 0),
            "kept_params": sum(math.prod(form.shape) for form in undivided if form.is_parameter),
        }


def translated(value: Any, fakes: Mapping[int, torch.Tensor]) -> Any:
    """Replace the parameters in a list of parameters or parameter groups with their fakes."""
    if isinstance(value, torch.Tensor):
        return fakes[id(value)]
    if isinstance(value, dict):
        return {**value, "params": translated(value["params"], fakes)}
    if value is None:
        return None
    return [translated(part, fakes) for part in value]


def without_state(optimizer: Any, fakes: Mapping[int, torch.Tensor]) -> Any:
    """Return a copy of a torch optimizer for the fakes, without state; return others unchanged."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    stateless = copy.copy(optimizer)
    stateless.param_groups = translated(optimizer.param_groups, fakes)
    stateless.state = defaultdict(dict)
    return stateless
