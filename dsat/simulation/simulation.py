"""Simulations of one configuration: DeepSpeed's engine, or the model alone, on fake tensors."""

from __future__ import annotations

import copy
import gc
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from dsat.command import ds_config
from dsat.memory.estimate import PHASES, SIMULATED, MemoryEstimate
from dsat.simulation import fake_device, patches
from dsat.simulation.autocast import Autocast, outside_of_contexts
from dsat.simulation.captured import Captured, repeated, translated, without_state
from dsat.simulation.fake_parameters import is_scripts
from dsat.simulation.known_values import ValuesMode
from dsat.simulation.operands import tensors_in
from dsat.simulation.operator_trace import OperatorTrace
from dsat.simulation.protocol import Question, SimulationUnsupported
from dsat.simulation.storage_tracker import ALL, DEVICE, HOST, MATMUL, PINNED, StorageTracker
from dsat.simulation.versions import transformers_models
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import read_strategy

# Settings of stage 3 that run compiled kernels of a GPU, which a fake device lacks.
_KERNELS_OF_GPU = (
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_gradients", "offload_optimizer.super_offload"),
)


class _FakeDevice:
    """Fake device or fake CPU, with its tracker; all tensors of this process become fake."""

    def __init__(self, captured: Captured, candidate: Question) -> None:
        self._captured = captured
        self._candidate = candidate
        self._adopted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scripts_dtype = next(captured.snapshot.module.parameters()).dtype
        self._dtype = self._scripts_dtype
        self._device = "cpu" if candidate.as_cpu else fake_device.DEVICE_TYPE
        self._kind = ALL if candidate.as_cpu else DEVICE
        self.tracker = StorageTracker(self._device)
        if candidate.traced:
            self.tracker.trace = OperatorTrace(self._device)
        self._values = ValuesMode()
        self.rules = patches.FunctionRules(self._adopt, self._device)
        self._prepare_process()
        for mode in (self._values, self.tracker, self.rules):
            mode.__enter__()

    def _prepare_process(self) -> None:
        slots, rank = self._candidate.slots, self._candidate.rank
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        # Autograd's device threads do not survive a fork, and nothing here needs to be parallel.
        torch._C._set_multithreading_enabled(False)
        # Functions given to `torch.compile` run uncompiled, since compilers query devices.
        if hasattr(torch.compiler, "set_stance"):
            torch.compiler.set_stance("force_eager")
        patches.forget_process_groups()
        if self._candidate.as_cpu:
            fake_device.install(CPU_Accelerator())
        else:
            fake_device.register()
            fake_device.install(fake_device.FakeAccelerator(self.tracker))
            Autocast(fake_device.DEVICE_TYPE)
        patches.apply(self.tracker, self._device, slots)
        transformers_models.decide_masks_by_values(self._values.knows)
        ranks = {"WORLD_SIZE": str(slots), "LOCAL_SIZE": str(slots), "RANK": str(rank)}
        os.environ.update(ranks, LOCAL_RANK="0")
        patches.make_process_group(slots, self._device, rank)

    def trace(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the trace as a part of the result; an empty dict if none was recorded."""
        if self.tracker.trace is None:
            return {}
        trace = self.tracker.trace.result(
            micro_batch=self._candidate.micro_batch,
            slots=self._candidate.slots,
            parameters=sum(parameter.requires_grad for parameter in module.parameters()),
        )
        return {"trace": trace.to_json()}

    # -- the script's own tensors

    def fakes_of(self, batch: Any) -> Any:
        """Return a batch with fake tensors.

        `FunctionRules` cannot replace inputs of autograd functions, as in reentrant checkpointing.
        """
        with torch._C.DisableTorchFunction():
            return self.rules.adopted(batch)

    def _adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor in the candidate's shape for a real one; leave scalars unchanged."""
        entry = self._adopted.get(id(tensor))
        if entry is not None:
            return entry[1]
        if tensor.dim() == 0:
            return tensor
        captured, candidate = self._captured, self._candidate
        shape = captured.shape_for(candidate, tensor)
        dtype = tensor.dtype
        if dtype.is_floating_point and dtype == self._scripts_dtype:
            dtype = self._dtype
        fake = torch.empty(
            shape, dtype=dtype, device=self._device, requires_grad=tensor.requires_grad
        )
        self._adopted[id(tensor)] = tensor, fake
        real = self._captured.on_host.get(id(tensor), tensor)
        if real.device.type == "cpu" and not (is_scripts(real) or dtype.is_floating_point):
            self._values.know(fake, lambda: repeated(real, shape))
        return fake


class Simulation(_FakeDevice):
    """A candidate's engine, whose last micro step computes the script's own loss."""

    def __init__(self, captured: Captured, candidate: Question) -> None:
        check_supported(candidate.config)
        super().__init__(captured, candidate)
        self.tracker.workspace_bytes = candidate.workspace_bytes
        self._engine = self._make_engine()
        self._dtype = next(self._engine.module.parameters()).dtype
        # Keep the originals: methods of the script's engine replace these later, and Lightning
        # replaces the module's `forward` for a single call.
        self._engine_backward, self._engine_step = self._engine.backward, self._engine.step
        self._engine_forward = self._engine.forward
        self._module_forward = vars(self._engine.module).get("forward")

    def _make_engine(self) -> Any:
        captured = self._captured
        is_parked = not (captured.snapshot.on_device or self._candidate.as_cpu)
        with self.tracker.placing(HOST if is_parked else DEVICE):
            fakes = captured.snapshot.put_fakes(self._device)
        arguments = {
            **captured.arguments,
            "config": self._config(),
            "model_parameters": translated(captured.arguments.get("model_parameters"), fakes),
            "optimizer": without_state(captured.arguments.get("optimizer"), fakes),
            "lr_scheduler": None,
            "training_data": None,
        }
        del fakes
        shared, micro_batch = self._candidate.parallelism, self._candidate.micro_batch
        if shared.sequence > 1:
            module = captured.snapshot.module
            arguments["mpu"] = patches.ulysses_groups(
                module, size=shared.sequence, micro_batch=micro_batch
            )
        gc.collect()
        self.tracker.begin("init")
        if captured.uses_zero_init:
            patches.partition_in_stage_3(captured.snapshot.module, arguments["config"])
        engine, *_ = captured.initialize(**arguments)
        if shared.tensor > 1:  # compares the ranks' batches
            engine.first_dataloader_check.remove()
        engine.train()
        engine.set_gradient_accumulation_boundary = lambda is_boundary: None
        gc.collect()
        return engine

    def _config(self) -> dict[str, Any]:
        candidate = self._candidate
        shared, micro_batch = candidate.parallelism, candidate.micro_batch
        batch = BatchTriple.on(candidate.slots, shared, micro_batch=micro_batch, gas=candidate.gas)
        return {
            **copy.deepcopy(dict(candidate.config)),
            **batch.config(),
            "steps_per_print": 10**9,
            "zero_force_ds_cpu_optimizer": False,  # accelerate has not replaced the optimizer yet
        }

    def become(self, engine: Any) -> None:
        """Turn the script's engine into the candidate's; the script may hold references to it."""
        object.__setattr__(engine, "__dict__", self._engine.__dict__)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run up to the last forward pass of the second optimizer step; return its outputs.

        The first step allocates all persistent state, for which any loss is good enough. Only in
        stage 3 does this step run the model, since the engine then records the order of modules.
        """
        needs_modules = read_strategy(self._candidate.config).stage == 3
        with outside_of_contexts():
            for micro_step in range(2 * self._candidate.gas - 1):
                steady = micro_step >= self._candidate.gas
                if not (steady or needs_modules):
                    vars(self._engine.module)["forward"] = self._loss_of_parameters
                self._step_once(args, kwargs, steady=steady)
        gc.collect()
        self._begin_micro_step(last=True)
        self._restore_forward()
        self.tracker.begin("forward")
        return self._engine(*args, **kwargs)

    def _step_once(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, steady: bool) -> None:
        self._begin_micro_step(last=False)
        self.tracker.begin("forward" if steady else "warm-up")
        loss = _some_loss(self._engine(*args, **kwargs))
        self._restore_forward()
        if steady:
            self.tracker.begin("backward")
        self._engine_backward(loss)
        del loss
        if steady:
            self.tracker.begin("step")
        self._engine_step()

    def _begin_micro_step(self, *, last: bool) -> None:
        if self.tracker.trace is not None:
            self.tracker.trace.is_last = last

    def _restore_forward(self) -> None:
        vars(self._engine.module).pop("forward", None)
        if self._module_forward is not None:
            vars(self._engine.module)["forward"] = self._module_forward

    def _loss_of_parameters(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return a loss of all parameters, in place of the module's forward pass."""
        trained = [p for p in self._engine.module.parameters() if p.requires_grad]
        return torch.stack([p.sum(dtype=torch.float32) for p in trained]).sum()

    def forward_again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._engine_forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.tracker.begin("backward")
        self._engine_backward(*args, **kwargs)

    def step(self) -> None:
        self.tracker.begin("step")
        self._engine_step()

    def result(self) -> dict[str, Any]:
        """Return the memory that the tracker measured, and the trace if one was recorded."""
        init, forward, backward, step = (self.tracker.peak(p, self._kind) for p in PHASES)
        # Without `init`, in which the script's own parameters exist; `loaded_bytes` counts these.
        pinned, pageable = (
            max(self.tracker.peak(p, kind) for p in PHASES[1:]) for kind in (PINNED, HOST)
        )
        estimate = MemoryEstimate(init, forward, backward, step, pinned, pageable, SIMULATED)
        return {"estimate": estimate.to_json(), **self.trace(self._engine.module)}


class ActivationPass(_FakeDevice):
    """Forward and backward pass of the model alone, without a DeepSpeed engine."""

    def __init__(self, captured: Captured, candidate: Question) -> None:
        super().__init__(captured, candidate)
        enabled, _ = ds_config.data_types(candidate.config)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(enabled))
        self._dtype = dtype or self._scripts_dtype
        captured.snapshot.put_fakes(self._device, dtype)
        self._module = captured.snapshot.module.train()
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        self._has_gradient = False
        self._bytes_before = 0

    def become(self, engine: Any) -> None:
        """Adapt the script's engine to passes of the model alone."""
        engine.set_gradient_accumulation_boundary = lambda is_boundary: None
        engine.device = torch.device(self._device)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._bytes_before = self.tracker.current(self._kind)
        self.tracker.begin("forward")
        return self.forward_again(args, kwargs)

    def forward_again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        section = self._candidate.config.get("torch_autocast") or {}
        with torch.autocast(
            self._device,
            getattr(torch, section.get("dtype", "bfloat16").removeprefix("torch.")),
            enabled=bool(section.get("enabled", False)),
        ):
            return self._module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        self.tracker.begin("backward")
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Do nothing: there is no optimizer."""

    def _on_gradient(self, _: torch.Tensor) -> None:
        if not self._has_gradient:
            self._has_gradient = True
            self.tracker.begin("first gradient")

    def result(self) -> dict[str, Any]:
        """Return peaks by phase, bytes held before and after the passes, and any trace."""
        peaks = {
            name: self.tracker.peak(name, self._kind)
            for name in ("forward", "backward", "first gradient", MATMUL)
        }
        return {
            "activations": {
                "forward": peaks["forward"],
                "backward": max(peaks["first gradient"], peaks["backward"]),
                "first_gradient": peaks["first gradient"],
                "matmul": peaks[MATMUL],
                "before": self._bytes_before,
                "held": self.tracker.current(self._kind),
            },
            **self.trace(self._module),
        }


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise SimulationUnsupported if an engine with this configuration needs a GPU's kernels."""
    zero = config.get("zero_optimization") or {}
    on = [name for name in _KERNELS_OF_GPU if ds_config.at(zero, name) is True]
    if on and read_strategy(config).stage == 3:
        raise SimulationUnsupported(f"{on[0]} needs a GPU and cannot be simulated")


def _some_loss(outputs: Any) -> torch.Tensor:
    """Return a loss: the first scalar output that requires a gradient.

    If there is none, return the sum of the means of all outputs that require one.
    """
    trained = [t for t in tensors_in(outputs) if t.requires_grad and t.is_floating_point()]
    if not trained:
        raise SimulationUnsupported("no output of the model depends on its parameters")
    scalars = [t for t in trained if t.dim() == 0]
    if scalars:
        return scalars[0]
    loss = trained[0].float().mean()
    for tensor in trained[1:]:
        loss = loss + tensor.float().mean()
    return loss
