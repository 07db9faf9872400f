"""Quantiser of ZeRO++ for weights and gradients, on fake tensors."""

from __future__ import annotations

import torch

_BITS_OF_BYTE = 8


class QuantizerBuilder:
    """Stands where DeepSpeed looks for what compiles the operator."""

    def load(self, verbose: bool = True) -> Quantizer:
        return Quantizer()


class Quantizer:
    """Allocates what csrc/quantization/pt_binding.cpp does, and computes nothing."""

    Symmetric, Asymmetric = False, True

    def quantize(
        self, values: torch.Tensor, groups: int, bits: int, kind: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups, kind)
        *outer, last = values.shape
        return _bytes(values, (*outer, last * bits // _BITS_OF_BYTE)), scales

    def dequantize(
        self, data: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: bool
    ) -> torch.Tensor:
        *outer, last = data.shape
        shape = (*outer, last * _BITS_OF_BYTE // bits)
        return torch.empty(shape, dtype=torch.half, device=data.device)

    def swizzle_quant(
        self, values: torch.Tensor, groups: int, bits: int, kind: bool, *_: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scales(values, groups, kind)
        return _bytes(values, (values.numel() * bits // _BITS_OF_BYTE,)), scales

    def quantized_reduction(
        self,
        data: torch.Tensor,
        scales: torch.Tensor,
        groups: int,
        groups_made: int,
        bits: int,
        kind: bool,
        devices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made = _scales(data, groups_made, kind)
        *outer, last = data.shape
        return _bytes(data, (*outer, last // devices)), made


def _scales(values: torch.Tensor, groups: int, asymmetric: bool) -> torch.Tensor:
    return torch.empty((groups, 1 + asymmetric), dtype=torch.float, device=values.device)


def _bytes(values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int8, device=values.device)
