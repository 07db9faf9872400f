"""FLOPs and parameters of a profile, compared with counts by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dsat.values.outcome import ModelProfile, OwnOptimizer
from testing.metered import Clock, FakeEngine, attach, measured_by, metrics_of


class RealEngine(FakeEngine):
    """The part of a DeepSpeedEngine that is needed to train a module."""

    def __init__(self, module: nn.Module, gas: int, own: object) -> None:
        super().__init__(Clock(), BATCH, gas)
        self.module, self.basic_optimizer = module, own
        self.sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> Any:
        loss.backward()  # type: ignore[no-untyped-call]

    def gradient_clipping(self) -> float:
        return 0.0

    def step(self) -> None:
        before = self.global_steps
        super().step()
        if self.global_steps > before:
            self.sgd.step()
            self.sgd.zero_grad()


BATCH, WIDE, HIDDEN, OUT = 6, 10, 24, 3


class Perceptron(nn.Module):
    """Two layers with the loss inside; on request, the hidden part is checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, HIDDEN)
        self.second = nn.Linear(HIDDEN, OUT)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor
        if self.reentrant is None:
            outputs = self.body(inputs)
        else:
            outputs = checkpoint(self.body, inputs, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(outputs, targets)

    def body(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(torch.relu(self.first(inputs)))
        return outputs


def profile_of(
    module: nn.Module,
    *,
    gas: int = 1,
    backward: Callable[[RealEngine, torch.Tensor], None] = RealEngine.backward,
    inputs_need_grad: bool = False,
    evaluate_first: bool = False,
    calls_engine: bool = True,
    slot_memory_bytes: int | None = None,
    own: object = "SGD",
) -> ModelProfile:
    engine = RealEngine(module, gas, own)
    steps = {"start_step": 2, "end_step": 2, "max_steps": 1}
    sizes = {"micro_batch": BATCH, "gas": gas, "slot_memory_bytes": slot_memory_bytes}
    attach(engine, profile=True, **steps, **sizes)
    inputs = torch.randn(BATCH, WIDE, requires_grad=inputs_need_grad)
    targets = torch.randn(BATCH, OUT)
    if evaluate_first:
        with torch.no_grad():
            engine.forward(inputs, targets)

    def loop() -> None:
        forward = engine.forward if calls_engine else engine.module
        for _ in range(99):
            backward(engine, forward(inputs, targets))
            engine.step()

    measured = measured_by(loop)
    profile, metrics = measured.profile, metrics_of(measured)
    assert profile is not None
    assert metrics.FLOPS_per_gpu == pytest.approx(profile.flops_per_sample * metrics.throughput)
    return profile


# Forward pass and weight gradients in both layers; input gradient only in the second.
FLOPS = 2 * (2 * (WIDE * HIDDEN + HIDDEN * OUT) + HIDDEN * OUT)
INPUT_FLOPS = 2 * WIDE * HIDDEN


@pytest.mark.usefixtures("accelerator")
class TestCounts:
    @pytest.mark.parametrize(
        ("options", "flops"),
        [
            ({}, FLOPS),
            ({"gas": 3}, FLOPS),
            ({"backward": lambda engine, loss: loss.backward()}, FLOPS),
            ({"evaluate_first": True}, FLOPS),
            ({"inputs_need_grad": True}, FLOPS + INPUT_FLOPS),
        ],
    )
    def test_flops_of_a_perceptron(self, options: dict[str, Any], flops: int) -> None:
        assert profile_of(Perceptron(), **options).flops_per_sample == flops

    def test_a_script_that_calls_its_model_itself(self) -> None:
        plain, itself = (
            profile_of(Perceptron(), calls_engine=calls, slot_memory_bytes=2**30)
            for calls in (True, False)
        )
        assert itself == plain and plain.activation_bytes_per_sample > 0

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputation_earns_nothing_and_keeps_nothing(self, reentrant: bool) -> None:
        """A reentrant checkpoint needs an input with a gradient, whose FLOPs then count as well."""
        again = profile_of(Perceptron(reentrant), inputs_need_grad=True)
        assert again.flops_per_sample == FLOPS + INPUT_FLOPS
        if not reentrant:
            plain = 4 * (WIDE + HIDDEN + 2 * OUT)
            assert again.activation_bytes_per_sample <= plain - 4 * HIDDEN

    @pytest.mark.parametrize(
        ("optimizer", "accelerated", "clips", "expected"),
        [
            ("AdamW", True, 0.0, OwnOptimizer("AdamW", moves_to_host=True)),
            ("AdamW", False, 1.0, OwnOptimizer("AdamW")),
            ("SGD", True, 0.0, OwnOptimizer("SGD")),
            ("Adafactor", False, 0.0, OwnOptimizer("Adafactor", by_element=False)),
            ("MuonWithAuxAdam", False, 0.0, OwnOptimizer("MuonWithAuxAdam")),
            ("MuonWithAuxAdam", False, 1.0, OwnOptimizer("MuonWithAuxAdam", by_element=False)),
        ],
    )
    def test_optimizers_that_depend_on_the_stage_or_are_replaced_where_they_are_offloaded(
        self,
        optimizer: str,
        accelerated: bool,
        clips: float,
        expected: OwnOptimizer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        plugins = {"deepspeed_plugins": {"default": "a plugin"}} if accelerated else {}
        state = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state=plugins))
        monkeypatch.setitem(sys.modules, "accelerate.state", state)
        monkeypatch.setattr(RealEngine, "gradient_clipping", lambda _: clips)
        model = Perceptron()
        kind = getattr(torch.optim, optimizer, None) or type(optimizer, (torch.optim.SGD,), {})
        assert profile_of(model, own=kind(model.parameters(), lr=0.1)).optimizer == expected

    @pytest.mark.parametrize("frozen", [False, True])
    def test_parameters(self, frozen: bool) -> None:
        module = Perceptron()
        module.first.requires_grad_(not frozen)
        profile = profile_of(module)
        first, second = WIDE * HIDDEN + HIDDEN, HIDDEN * OUT + OUT
        assert profile.num_params == first + second
        assert profile.trainable_params == second + (0 if frozen else first)
        assert profile.param_bytes == 4
        if frozen:  # no gradient of the frozen weights, nor of what goes into the second layer
            assert profile.flops_per_sample == 2 * (WIDE * HIDDEN + 2 * HIDDEN * OUT)

    def test_partitioned_parameters_count_whole(self) -> None:
        """ZeRO stage 3 keeps an empty tensor whose `ds_numel` is its full size."""
        module = Perceptron()
        size = module.first.weight.numel()
        module.first.weight.ds_numel = 5 * size  # type: ignore[attr-defined]
        assert profile_of(module).num_params == 5 * size + HIDDEN + HIDDEN * OUT + OUT

    def test_memory_of_a_slot_is_no_more_than_it_may_use(self) -> None:
        assert profile_of(Perceptron(), slot_memory_bytes=12345).slot_memory_bytes == 12345
        assert profile_of(Perceptron()).slot_memory_bytes > 2**20
