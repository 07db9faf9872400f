"""Attention kernels that torch would choose, and their workspaces.

torch's own choice queries the device, and a simulation has none. These rules follow torch 2.15
for a CPU (`use_flash_attention_cpp` in aten/src/ATen/native/transformers/sdp_utils_cpp.cpp) and for
compute capability 8.0 (`select_sdp_backend` in cuda/sdp_utils.cpp beside it); tests compare them
with torch's choices. On 9.0 and 10.0 torch prefers cuDNN. Flash attention stands in for it: both
keep the same tensors for the backward pass, but the size of cuDNN's workspace is unknown.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten

_LARGEST_FLASH_HEAD = 256
_HALF = (torch.float16, torch.bfloat16)
# Kernels need head sizes in multiples of these; the mask's last dimension is padded.
_FLASH_ALIGNMENT, _MASK_ALIGNMENT = 8, 16
_EFFICIENT_ALIGNMENT = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
_SAMPLES_HEADS_TOKENS = 4  # number of dimensions: batch, heads, tokens, head size


class Kernel(enum.Enum):
    """Kernel of scaled dot product attention."""

    FLASH = enum.auto()
    EFFICIENT = enum.auto()
    MATH = enum.auto()


def kernel_for(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Kernel:
    """Return the kernel that torch would choose among those that the script enables.

    Args:
        query: batch x heads x tokens x head size.
        key, value: likewise; their numbers of tokens and heads may differ from the query's.
        mask: added to the scores, or boolean.
        enable_gqa: whether several heads of the query may share a head of key and value.
    """
    if not _fit_fused_kernels(query, key, value, enable_gqa=enable_gqa):
        return Kernel.MATH
    tensors = (query, key, value)
    sizes = {t.size(-1) for t in tensors}
    contiguous = all(t.stride(-1) == 1 for t in tensors)
    if query.device.type == "cpu":
        flash = (
            torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
            and dropout_p == 0
            and not (mask is not None and mask.requires_grad)
            and contiguous
            and len(sizes) == 1
        )
        return Kernel.FLASH if flash else Kernel.MATH
    flash = (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and mask is None
        and query.dtype in _HALF
        and len(sizes) == 1
        and query.size(-1) <= _LARGEST_FLASH_HEAD
        and not (is_causal and query.size(-2) != key.size(-2))
        and (contiguous or query.size(-1) == 1)
    )
    if flash:
        return Kernel.FLASH
    alignment = _EFFICIENT_ALIGNMENT.get(query.dtype)
    efficient = (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and alignment is not None
        and query.size(-1) == key.size(-1)
        and not any(size % alignment for size in sizes)
        and contiguous
        and (mask is None or mask.stride(-1) == 1)
    )
    return Kernel.EFFICIENT if efficient else Kernel.MATH


def _fit_fused_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool
) -> bool:
    """Return True if the fused kernels support these types, samples and heads."""
    tensors = (query, key, value)
    if any(t.dim() != _SAMPLES_HEADS_TOKENS or 0 in t.shape for t in tensors):
        return False
    if len({(t.dtype, t.size(0)) for t in tensors}) > 1 or key.size(1) != value.size(1):
        return False
    heads, shared = query.size(1), key.size(1)
    return heads % shared == 0 if enable_gqa else shared in (heads, 1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run `scaled_dot_product_attention` with the kernel that torch would choose."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if query.dim() == key.dim() == value.dim() == _SAMPLES_HEADS_TOKENS - 1:  # no batch
        while attn_mask is not None and attn_mask.dim() < _SAMPLES_HEADS_TOKENS:
            attn_mask = attn_mask.unsqueeze(0)
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        return attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        ).squeeze(0)
    kernel = kernel_for(
        query, key, value, attn_mask, dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
    )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    output: torch.Tensor
    if kernel is Kernel.MATH:
        output, _ = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output
    if kernel is Kernel.EFFICIENT:
        bias = _bias(attn_mask, query, key)
        output, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
        return output
    if query.device.type == "cpu":
        if enable_gqa:
            groups = query.size(1) // key.size(1)
            key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        output, _ = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return output
    size = query.size(-1)
    padding = -size % _FLASH_ALIGNMENT
    if padding:
        scale = size**-0.5 if scale is None else scale
        query, key, value = (functional.pad(t, (0, padding)) for t in (query, key, value))
    output, *_ = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )
    return output[..., :size] if padding else output


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask, if any, padded and expanded as the memory-efficient kernel requires."""
    if mask is None:
        return None
    padding = -mask.size(-1) % _MASK_ALIGNMENT
    if padding and mask.size(-1) > 1:
        mask = functional.pad(mask, (0, padding))[..., :-padding]
    return mask.expand(*query.shape[:-1], key.size(-2))


# -- workspaces


def workspace_bytes(function: Any, args: Sequence[Any]) -> int:
    """Return the bytes that an operator allocates only while it runs; 0 unless it is attention."""
    of = _WORKSPACES.get(function)
    return 0 if of is None else of(args)


def _flash_backward(args: Sequence[Any]) -> int:
    """Return the bytes that `mha_bwd` of flash_attn/flash_api.cpp allocates.

    These are fp32 accumulators for the query's gradient and the softmax, gradients of shared heads
    before summation, and copies of inputs that are not contiguous as samples x tokens x heads.
    """
    gradient, query, key, _, out = args[:5]
    samples, heads, tokens, size = query.shape
    rows = samples * heads * _round_up(tokens, 128)
    padded_size = _round_up(size, 32) if size <= 192 else 256
    sources = [t for t in (gradient, out) if not t.transpose(1, 2).is_contiguous()]
    copies = sum(int(t.numel() * t.element_size()) for t in sources)
    return int(4 * rows * (padded_size + 1)) + copies + _shared_heads(query, key)


def _efficient_forward(args: Sequence[Any]) -> int:
    """Return the bytes of fp32 accumulators of large heads (`_efficient_attention_forward`)."""
    query, _, value = args[:3]
    is_large = query.dtype in _HALF and value.size(-1) > 128
    return int(4 * (query.numel() // query.size(-1)) * value.size(-1)) if is_large else 0


def _efficient_backward(args: Sequence[Any]) -> int:
    """Return the bytes that `_efficient_attention_backward` (cuda/attention_backward.cu) allocates.

    These are `delta`, gradients of shared heads, and fp32 accumulators by blocks
    (`workspace_elements_*` of mem_eff_attention/kernel_backward.h) for the query's gradient and,
    with large heads, the key's and the value's.
    """
    _, query, key = args[:3]
    samples, heads, tokens, size = query.shape
    is_half, keys = query.dtype in _HALF, key.size(2)
    rows = 64 if size <= 64 else 128
    columns = 128 if is_half and 64 < size <= 128 else 64
    sums = _round_up(tokens, rows) * _round_up(size, columns)
    if is_half and size > rows:  # more than registers hold
        parts = max(1, min(-(-keys // columns), 200 // (samples * heads)))
        sums += 2 * parts * columns * _round_up(size, rows)
    return int(4 * samples * heads * (sums + tokens)) + _shared_heads(query, key)


def _shared_heads(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the bytes of separate key and value gradients for all query heads; 0 if unshared."""
    if query.size(1) == key.size(1):
        return 0
    samples, heads, _, size = query.shape
    return int(2 * samples * heads * key.size(2) * size * key.element_size())


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_WORKSPACES: Mapping[Any, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
