"""Building of the script's model without the memory of its parameters.

Until `uninstall`, every large parameter and buffer of a module is a fake tensor, without values.
Results computed from it are fake, too. The script's data, small parameters and random numbers are
real. Initialisers and `load_state_dict` do not change a fake tensor, and large files of weights are
not read. `item()` returns a constant of the right type. Functions that cannot work, such as
`numpy()`, raise an error; then formulas replace the simulation.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import wrapt
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dsat.simulation.protocol import SimulationUnsupported
from dsat.simulation.versions.transformers_models import loads_float32, type_argument

aten = torch.ops.aten

# Smaller parameters and buffers are real, because some scripts read them.
SMALLEST_FAKE_BYTES = 2**20
# A module's larger initial values are not even computed.
_LARGEST_INITIAL_BYTES = 2**25
_INITIAL_VALUES = ("empty", "full", "ones", "rand", "randn", "zeros")
_LARGEST_FILE_READ_BYTES = 2**25
_NOT_FAKED = ("gguf_file", "quantization_config", "tp_plan")
_LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


class ScriptMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Mode of the script's own fake tensors; fake tensors of simulations have `ValuesMode`."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return value_of(args[0].dtype)
        if func is aten.equal.default:
            return True
        return super().__torch_dispatch__(func, types, tuple(args), kwargs)


def value_of(dtype: torch.dtype) -> bool | float | int:
    """Return the constant that `item()` gives for a fake tensor of this type."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0  # an integer may be a flag of an overflow


def is_scripts(tensor: torch.Tensor) -> bool:
    """Return True for a fake tensor of the script, False for a simulation's."""
    return isinstance(tensor, FakeTensor) and isinstance(tensor.fake_mode, ScriptMode)


class FakeParameters:
    """Patches of torch, transformers and DeepSpeed that make large parameters fake.

    Attributes:
        fake_bytes: total size of the parameters and buffers that were made fake.
    """

    def __init__(self) -> None:
        self.fake_bytes = 0
        self._mode = ScriptMode()
        self._undo = contextlib.ExitStack()
        self._opened_zero_init = False
        self._made_by_transformers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def partitions_in_stage_3(self, model: torch.nn.Module) -> bool:
        """Return whether stage 3 partitions a model's parameters while the script makes it.

        True if the script used `zero.Init`, or if transformers knew a DeepSpeed configuration when
        it made the model. The current stage does not matter: a candidate's stage replaces it.
        """
        models = self._made_by_transformers
        return self._opened_zero_init or any(module in models for module in model.modules())

    def install(self) -> None:
        """Patch torch and DeepSpeed now, and transformers now or at its import."""
        self._replace(torch.nn.Parameter, "__new__", self._new_parameter)
        self._replace(torch.nn.Module, "register_buffer", self._register_buffer)
        self._replace(torch.nn.Module, "_apply", convert_in_place)
        self._replace(FakeTensor, "__deepcopy__", lambda _: _deep_copy)
        for name in _INITIAL_VALUES:
            self._replace(torch, name, self._initial_values)
        self._replace(torch, "load", self._load)
        self._replace_zero_init()
        wrapt.register_post_import_hook(self._adapt_transformers, "transformers.modeling_utils")

    def uninstall(self) -> None:
        """Undo `install`; fake tensors stay fake."""
        self._undo.close()

    # -- tensors

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor of the same form for a large one; return others unchanged."""
        size = tensor.numel() * tensor.element_size()
        if is_scripts(tensor):
            self.fake_bytes += size
            return tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
            return tensor
        if size < SMALLEST_FAKE_BYTES:
            return tensor
        self.fake_bytes += size
        form = tensor.shape, tensor.stride()
        with self._mode:
            return torch.empty_strided(*form, dtype=tensor.dtype, device=tensor.device)

    def _new_parameter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            if cls is torch.nn.Parameter and isinstance(data, torch.Tensor):
                data = self._fake_of(data)
            return original(cls, data, requires_grad)

        return new

    def _register_buffer(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def register_buffer(
            module: torch.nn.Module, name: str, tensor: Any, *args: Any, **kwargs: Any
        ) -> None:
            if isinstance(tensor, torch.Tensor):
                tensor = self._fake_of(tensor)
            original(module, name, tensor, *args, **kwargs)

        return register_buffer

    def _initial_values(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Wrap a factory function: in a module's constructor, large float results are fake."""

        @functools.wraps(original)
        def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _in_constructor(sys._getframe(1)):
                with self._mode:
                    fake = original(*args, **kwargs)
                if fake.is_floating_point() and fake.nbytes > _LARGEST_INITIAL_BYTES:
                    return fake
            return original(*args, **kwargs)

        return factory

    # -- files of weights

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            is_path = isinstance(f, (str, os.PathLike))
            if is_path and os.path.exists(f) and os.path.getsize(f) > _LARGEST_FILE_READ_BYTES:
                with self._mode:
                    return original(f, *args, **kwargs)
            return original(f, *args, **kwargs)

        return load

    # -- libraries

    def _adapt_transformers(self, module: Any) -> None:
        base = module.PreTrainedModel
        from_config = base.__dict__["_from_config"]

        def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
            model = from_config.__get__(None, cls)(*args, **kwargs)
            if module.deepspeed_config() is not None:
                self._made_by_transformers.add(model)
            return model

        self._replace(base, "from_pretrained", lambda _: classmethod(_from_config_alone))
        self._replace(base, "_from_config", lambda _: classmethod(noted))

    def _replace(self, place: Any, name: str, build: Callable[[Any], Any]) -> None:
        new = build(getattr(place, name))
        self._undo.enter_context(mock.patch.object(place, name, new))

    def _replace_zero_init(self) -> None:
        """Make `zero.Init` only record its use: it would leave the script with empty parameters.

        `enabled=False` counts as use, too: scripts derive it from the stage, which may be 0 here.
        """
        module: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")

        def note(*_: Any, **__: Any) -> None:
            self._opened_zero_init = True

        def nothing(*_: Any) -> None: ...

        for name in ("__enter__", "__exit__"):
            self._replace(module.Init, name, lambda _: nothing)
        self._replace(module.Init, "__init__", lambda _: note)


def _in_constructor(frame: Any) -> bool:
    """Return True if a module's constructor is among the callers."""
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            first = frame.f_code.co_varnames[:1]
            if first and isinstance(frame.f_locals.get(first[0]), torch.nn.Module):
                return True
        frame = frame.f_back
    return False


def convert_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Module._apply` (`to`, `bfloat16`, ...): torch cannot swap fake parameters."""

    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        fakes: dict[str, torch.nn.Parameter | None] = {}
        for name, parameter in self._parameters.items():
            if parameter is not None and isinstance(parameter, FakeTensor):
                with torch.no_grad():
                    assign(parameter, fn(parameter))
                fakes[name] = parameter
        for name in fakes:
            self._parameters[name] = None
        try:
            return original(self, fn, recurse)
        finally:
            self._parameters.update(fakes)

    return apply


def assign(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Set `tensor.data`, also to a tensor of another type or device."""
    if other is not tensor:
        tensor.data = other.detach()
        if isinstance(tensor, FakeTensor) and isinstance(other, FakeTensor):
            tensor.fake_device = other.fake_device


def _deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy a fake tensor; a parameter stays a parameter."""
    if id(tensor) not in memo:
        with torch.no_grad():
            clone = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            clone = torch.nn.Parameter(clone, tensor.requires_grad)
        else:
            clone.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = clone
    return memo[id(tensor)]


def _from_config_alone(cls: Any, name: Any, *model_args: Any, **kwargs: Any) -> Any:
    """Replace `PreTrainedModel.from_pretrained`: read the configuration, and no weights."""
    unsupported = [key for key in _NOT_FAKED if kwargs.pop(key, None) is not None]
    if unsupported:
        raise SimulationUnsupported(f"from_pretrained with {unsupported[0]} cannot be simulated")
    with_info = kwargs.pop("output_loading_info", False)
    implementation = kwargs.pop("attn_implementation", None)
    dtype = kwargs.pop("torch_dtype", None)
    dtype = kwargs.pop("dtype", dtype)
    config = kwargs.pop("config", None)
    base = importlib.import_module("transformers.configuration_utils")
    base = getattr(base, "PreTrainedConfig", None) or base.PretrainedConfig
    if isinstance(config, base):
        config = copy.deepcopy(config)
    else:
        config, kwargs = cls.config_class.from_pretrained(
            config or name, return_unused_kwargs=True, **kwargs
        )
    if getattr(config, "quantization_config", None) is not None:
        raise SimulationUnsupported("a quantized model cannot be simulated")
    config.name_or_path = str(name)
    if implementation is not None:
        config._attn_implementation = implementation
    type_args = type_argument(_dtype(dtype, config))
    accepted = inspect.signature(cls.__init__).parameters  # all others are about files and devices
    kwargs = {key: value for key, value in kwargs.items() if key in accepted}
    model = cls._from_config(config, *model_args, **type_args, **kwargs)
    model.eval()
    return (model, {name: [] for name in _LOADING_INFO}) if with_info else model


def _dtype(dtype: Any, config: Any) -> torch.dtype:
    """Return the type in which `from_pretrained` would load."""
    if dtype is None and loads_float32():
        return torch.float32
    if dtype is None or dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return dtype or torch.float32
