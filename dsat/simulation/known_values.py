"""Fake tensors with known values: small ones, such as tokens, masks and sizes of images.

Models compare and count such values, index with them, and have shapes that depend on them. If all
inputs of an operator are known, it runs twice: on the fake tensors, and on the CPU with their
values. The results on the CPU are the values of the fake results. Views share memory, so they see
values that are written in place.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from dsat.memory.estimate import MOST_TOKENS
from dsat.simulation.fake_parameters import value_of
from dsat.simulation.operands import name_arguments, tensors_in

aten = torch.ops.aten
_MOST_FLOATS = 2**12  # elements; enough for positions in an image, too few for activations
_UNINITIALISED = ("aten::empty", "aten::new_empty", "prims::empty")
_REAL = "_dsat_real"  # attribute of a fake tensor that holds its values
_COMPARISONS = {getattr(aten, name).Scalar for name in ("gt", "ge", "lt", "le", "eq", "ne")}


class ValuesMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Mode of fake tensors, some with known values; for the others, `item()` gives a constant."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()  # storages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch calls the mode directly: nothing is compiled here."""
        return False

    def know(self, fake: torch.Tensor, values: Callable[[], torch.Tensor]) -> None:
        """Give a fake tensor its values on the CPU, unless there are too many."""
        if _is_small(fake):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                setattr(fake, _REAL, values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_known = self._is_known(func, args, kwargs)
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            if is_known:
                return self._run(func, args, kwargs)
            return True if func is aten.equal.default else value_of(args[0].dtype)
        if func is aten.masked_select.default and self._real(args[1]) is not None:
            with self:
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
                return args[0].expand(shape)[args[1].expand(shape)]
        if not is_known and self._is_view(func, args, kwargs):
            return self._view(func, args, kwargs)
        if not is_known:
            self._forget_written(func, args, kwargs)
            out: Any = super().__torch_dispatch__(func, types, self._to_fake(func, args), kwargs)
            self._forget_parts(out, (*args, *kwargs.values()))
            if func in _COMPARISONS and out.numel() == 1:
                # As with `item()`: DeepSpeed up to 0.19.2 asserts that a norm is above 0.
                operand, other = torch.full(out.shape, value_of(args[0].dtype)), args[1]
                self.know(out, lambda: func(operand, other))
            return out
        if torch.Tag.dynamic_output_shape in func.tags:
            return self._wrap_real(self._run(func, args, kwargs), next(tensors_in(args)).device)
        out = super().__torch_dispatch__(func, types, self._to_fake(func, args), kwargs)
        if self._may_be_known(out, has_inputs=any(True for _ in tensors_in((args, kwargs)))):
            self._add_values(out, func, args, kwargs)
        else:
            self._forget_written(func, args, kwargs)
        return out

    def _to_fake(self, func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return an operator's arguments, with a fake tensor in place of a real one that it copies.

        The device to which it copies may not exist.
        """
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            return (self.from_tensor(args[0]), *args[1:])
        return tuple(args)

    def _is_view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True for an operator that only makes a view of one fake tensor of this mode."""
        if not _is_plain_view(func):
            return False
        first, rest = args[0], (args[1:], kwargs)
        return (
            isinstance(first, FakeTensor)
            and first.fake_mode is self
            and first.constant is None
            and not any(True for _ in tensors_in(rest))
        )

    def _view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a view of a fake tensor.

        Half of all operators are views. torch's own mode takes ten times as long for them, because
        the keys of its cache include offsets.
        """
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        parts = [result] if isinstance(result, torch.Tensor) else result
        device = args[0].fake_device
        fakes = [p if isinstance(p, FakeTensor) else FakeTensor(self, p, device) for p in parts]
        return fakes[0] if isinstance(result, torch.Tensor) else type(result)(fakes)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return True if the values of a tensor are known."""
        return self._real(tensor) is not None

    # -- known values

    def _real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; None if they are not known."""
        if not isinstance(tensor, FakeTensor):
            is_there = tensor.device.type == "cpu" and _is_small(tensor)
            return tensor.detach() if is_there else None
        real: torch.Tensor | None = getattr(tensor, _REAL, None)
        if real is None or real.untyped_storage() in self._unknown:
            return None
        return real

    def _is_known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True for torch's operators with known inputs, except `empty` and its variants."""
        if func.namespace not in ("aten", "prims") or func._schema.name.startswith(_UNINITIALISED):
            return False
        inputs = tensors_in((args, kwargs))
        return all(self._real(tensor) is not None for tensor in inputs)

    @staticmethod
    def _may_be_known(out: Any, *, has_inputs: bool) -> bool:
        fakes = [part for part in tensors_in([out]) if isinstance(part, FakeTensor)]
        integers = not any(fake.dtype.is_floating_point for fake in fakes)
        return bool(fakes) and all(map(_is_small, fakes)) and (has_inputs or integers)

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Forget the values of tensors that an operator writes to, and of their views."""
        targets: list[Any] = []
        if func.namespace == "c10d":  # schemas of collectives do not name what they write
            targets = [*args, *kwargs.values()]
        elif func._schema.is_mutable:
            arguments = name_arguments(func, args, kwargs)
            targets = [
                arguments.get(argument.name)
                for argument in func._schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        for tensor in tensors_in(targets):
            real = getattr(tensor, _REAL, None)
            if real is not None:
                self._unknown.add(real.untyped_storage())

    @staticmethod
    def _forget_parts(out: Any, inputs: Iterable[Any]) -> None:
        """Forget the values of results with unknown inputs, even if a part of them is constant."""
        input_ids = {id(tensor) for tensor in tensors_in(inputs)}
        for tensor in tensors_in([out]):
            if id(tensor) not in input_ids and hasattr(tensor, _REAL):
                delattr(tensor, _REAL)

    # -- the real run

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return func(*tree_map(self._unwrap_real, args), **tree_map(self._unwrap_real, kwargs))

    def _unwrap_real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._real(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _add_values(
        self, out: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        try:
            real = self._run(func, args, kwargs)
        except Exception as error:  # an operator that the CPU lacks, say
            logging.getLogger(__name__).debug("%s: %s", func, error)
            self._forget_written(func, args, kwargs)
            return
        for fake, values in zip(tensors_in([out]), tensors_in([real]), strict=True):
            if isinstance(fake, FakeTensor):
                setattr(fake, _REAL, values)

    def _wrap_real(self, value: Any, device: torch.device) -> Any:
        """Make fake tensors with the shapes and values of real ones."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._wrap_real(part, device) for part in value)
        if not isinstance(value, torch.Tensor):
            return value
        with self:
            fake = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
        setattr(fake, _REAL, value)
        return fake


@functools.cache
def _is_plain_view(func: Any) -> bool:
    """Return True for an operator of torch that makes views and is not a composite."""
    is_view = func.is_view and func.namespace == "aten"
    composite = torch._C._dispatch_has_kernel_for_dispatch_key
    return is_view and not composite(func.name(), "CompositeImplicitAutograd")


def _is_small(tensor: torch.Tensor) -> bool:
    limit = _MOST_FLOATS if tensor.dtype.is_floating_point else MOST_TOKENS
    return tensor.numel() <= limit and not tensor.dtype.is_complex
