"""Autocast on the simulation's device, like CUDA's: torch has none for a private device.

The lists of operators by type are those of aten/src/ATen/autocast_mode.h (torch 2.15). As in CUDA's
autocast, casts of trained fp32 parameters are cached until the outermost context ends. So in a
forward pass each parameter takes two bytes in addition to its four.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_map

from dsat.simulation.operands import name_arguments, tensors_in

_KEY = "AutocastPrivateUse1"
_LOWER_PRECISION = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
    mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()
_FULL_PRECISION = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
    group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim
""".split()
# These get `dtype=torch.float32` if the caller passes no `dtype`.
_WITH_DTYPE = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
_WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()


class Autocast:
    """Autocast of the simulation's device, like CUDA's, for the rest of the process."""

    def __init__(self, device_type: str) -> None:
        """Register the casts, and redirect CUDA's autocast to the device."""
        self._device_type = device_type
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        fallback, aten = Library("_", "IMPL"), Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries = fallback, aten  # own the registered kernels
        fallback.fallback(fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
        for names, rule in (
            (_LOWER_PRECISION, self._lower),
            (_FULL_PRECISION, self._full),
            (_WITH_DTYPE, self._full_by_dtype),
            (_WIDEST, self._widest),
        ):
            for name in names:
                operator = _operator(name)
                if operator is not None:  # other versions of torch name some differently
                    aten.impl(name, functools.partial(rule, operator), _KEY)  # type: ignore[no-untyped-call]
        self._follow_contexts()

    def _follow_contexts(self) -> None:
        """Make autocast contexts for CUDA, even those that are open, apply to the device."""
        is_active, clear = torch.is_autocast_enabled("cuda"), torch.clear_autocast_cache
        if is_active:
            torch.set_autocast_enabled(self._device_type, True)
            torch.set_autocast_dtype(self._device_type, torch.get_autocast_dtype("cuda"))
        original = torch.autocast.__init__

        @functools.wraps(original)
        def initialize(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            target_type = self._device_type if device_type == "cuda" else device_type
            original(context, target_type, *args, **kwargs)

        def clear_cache() -> None:
            self._casts.clear()
            clear()

        is_enabled = torch.is_autocast_enabled

        def is_autocast_enabled(device_type: str = "cuda") -> bool:
            return is_enabled(self._device_type if device_type == "cuda" else device_type)

        torch.autocast.__init__ = initialize  # type: ignore[assignment,method-assign]
        torch.clear_autocast_cache = clear_cache
        torch.is_autocast_enabled = is_autocast_enabled

    # -- the four rules

    def _lower(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(operator, torch.get_autocast_dtype(self._device_type), args, kwargs)

    def _full(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(operator, torch.float32, args, kwargs)

    def _full_by_dtype(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = name_arguments(operator, args, kwargs)
        with torch._C._DisableAutocast():
            if self._is_eligible(args[0]) and arguments.get("dtype") is None:
                arguments["dtype"] = torch.float32
            return operator(**arguments)

    def _widest(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(self._device_type)
        for tensor in tensors_in((args, kwargs)):
            if self._is_eligible(tensor):
                dtype = torch.promote_types(dtype, tensor.dtype)
        return self._run(operator, dtype, args, kwargs)

    def _run(self, operator: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        cast = functools.partial(self._cast, dtype=dtype)
        with torch._C._DisableAutocast():
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    # -- casts

    def _is_eligible(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype != torch.float64
            and value.device.type == self._device_type
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not self._is_eligible(value) or value.dtype == dtype:
            return value
        keeps = (
            dtype != torch.float32
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value, value.to(dtype)
        return self._casts[id(value)][1]


@contextlib.contextmanager
def outside_of_contexts() -> Iterator[None]:
    """Pretend that no autocast context is open, so that each new one drops its casts at its end.

    Autocast stays enabled.
    """
    nesting = torch.autocast_increment_nesting() - 1
    for _ in range(nesting + 1):
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(nesting):
            torch.autocast_increment_nesting()


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    overloads = getattr(torch.ops.aten, packet, None)
    return getattr(overloads, overload or "default", None)
