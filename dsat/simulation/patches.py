"""Changes to torch and DeepSpeed that let an engine run on fake tensors.

Except for `for_fake_cpu` and a process group of one rank, the changes are made only in a process
that is forked for one simulation. They were checked with torch 2.15 and deepspeed 0.19.8.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import wrapt
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dsat.simulation import named_cuda
from dsat.simulation.attention import attention
from dsat.simulation.fake_parameters import convert_in_place, is_scripts
from dsat.simulation.protocol import SimulationUnsupported
from dsat.simulation.rank_views import RankViews
from dsat.simulation.storage_tracker import StorageTracker
from dsat.simulation.versions import collectives
from dsat.values.zero_strategy import read_strategy

aten = torch.ops.aten
FAKE_GROUP = "fake"  # backend of torch.testing, whose collectives do nothing


class FunctionRules(TorchFunctionMode):
    """Mode that changes calls of torch's functions.

    The script's tensors become fake tensors, `numbers` are replaced, CUDA becomes the simulation's
    device, and torch's attention becomes `dsat.simulation.attention`.

    Attributes:
        numbers: integers that are replaced in arguments; see `Captured.numbers_for`.
    """

    def __init__(self, adopt: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
        super().__init__()
        self._adopt, self._device = adopt, device
        self.numbers: dict[int, int] = {}
        self._torchs_attention = functional.scaled_dot_product_attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self.adopted(args), self.adopted(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        return (attention if func is self._torchs_attention else func)(*args, **kwargs)

    def adopted(self, value: Any) -> Any:
        """Return arguments with fake tensors and the simulation's device in place of CUDA."""
        if isinstance(value, torch.Tensor):
            is_simulated = isinstance(value, FakeTensor) and not is_scripts(value)
            return value if is_simulated else self._adopt(value)
        if type(value) is int:
            return self.numbers.get(value, value)
        if isinstance(value, slice):
            return slice(*map(self.adopted, (value.start, value.stop, value.step)))
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self.adopted(part) for part in value)
        if type(value) is dict:
            return {key: self.adopted(part) for key, part in value.items()}
        return named_cuda.renamed(value, self._device)


class _NoOperator:
    """Stand-in for an operator that DeepSpeed compiles; it allocates and returns nothing."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **_: self._tracker.ran_compiled(args)


def apply(tracker: StorageTracker, device_type: str, ranks: int) -> None:
    """Apply the patches, for the rest of the process."""
    from deepspeed.accelerator import get_accelerator

    # torch chooses the multi-tensor form of an optimizer by exact types.
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers._foreach_supported_types.append(FakeTensor)
    # A fake mode would first make a real tensor to initialise the device.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    for place, name, value in _operator_changes(tracker):
        setattr(place, name, value)
    # DeepSpeed's Muon compiles a function at its import, which takes seconds.
    torch.compile = _leave_uncompiled  # type: ignore[assignment]
    # This check compares values across ranks, and fake collectives move none.
    for name in ("zero.partition_parameters", "zero.partitioned_param_coordinator", "zero.stage3"):
        module: Any = importlib.import_module(f"deepspeed.runtime.{name}")
        module.assert_ints_same_as_other_ranks = lambda *args, **kwargs: None
    _trust_vocabulary_shards()
    # torch would swap fake parameters for new ones, which lack DeepSpeed's attributes.
    torch.nn.Module._apply = convert_in_place(torch.nn.Module._apply)  # type: ignore[method-assign]
    # Fake tensors have no address, and DeepSpeed checks alignment.
    torch.Tensor.data_ptr = lambda self: 0  # type: ignore[method-assign]
    # `record_stream` only delays the reuse of memory.
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: get_accelerator().pin_memory(self)  # type: ignore[method-assign]
    # For calls from within another torch function, which FunctionRules does not see.
    functional.scaled_dot_product_attention = attention
    _patch_moves(tracker, device_type)
    skip_triton_kernels()
    RankViews(ranks).install()
    named_cuda.forget_the_real_one()


def _trust_vocabulary_shards() -> None:
    """Skip the check of AutoTP's vocabulary shards: fake collectives do not exchange their sizes.

    Earlier versions of DeepSpeed divide no vocabulary.
    """

    def whole(local_size: int, start: int, end: int, group: Any, device: Any) -> int:
        return end if group is None else local_size * torch.distributed.get_world_size(group)

    with contextlib.suppress(ImportError):
        losses: Any = importlib.import_module("deepspeed.sequence.cross_entropy")
        losses._validate_vocab_shard_bounds = whole


def skip_triton_kernels() -> None:
    """Make Triton's kernels do nothing, even if it is imported later, for the rest of the process.

    Outputs of a kernel are allocated before its launch; fake ones have no address to write to.
    """

    def skip(name: str, module: Any) -> None:
        getattr(module, name).run = lambda self, *args, **kwargs: None

    for module, name in (("jit", "JITFunction"), ("autotuner", "Autotuner")):
        hook = functools.partial(skip, name)
        wrapt.register_post_import_hook(hook, f"triton.runtime.{module}")


@contextlib.contextmanager
def for_fake_cpu(tracker: StorageTracker) -> Iterator[None]:
    """Let DeepSpeed work with fake tensors on the CPU, in the process of a script.

    fp16 and bf16 count as supported: only the machine that runs trials decides that.
    """
    from deepspeed.accelerator import real_accelerator

    accelerator = CPU_Accelerator()
    accelerator.is_fp16_supported = accelerator.is_bf16_supported = lambda: True
    changes = [
        (real_accelerator, "ds_accelerator", accelerator),
        *_operator_changes(tracker),
        (torch.Tensor, "data_ptr", lambda self: 0),
        (torch.nn.Module, "to", lambda self, *_, **__: self),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, value in changes:
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def _leave_uncompiled(function: Any = None, **_: Any) -> Any:
    return _leave_uncompiled if function is None else function


def _operator_changes(tracker: StorageTracker) -> list[tuple[Any, str, Any]]:
    """Return changes that keep DeepSpeed from compiling operators, which would access memory."""
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder

    def load(self: Any, verbose: bool = True) -> _NoOperator:
        return _NoOperator(tracker)

    communication: Any = importlib.import_module("deepspeed.comm.torch")
    processor: Any = importlib.import_module("cpuinfo")
    return [
        # DeepSpeedCPUAdam looks up the processor's vendor, which takes a second.
        (processor, "get_cpu_info", dict),
        (OpBuilder, "load", load),
        (NotImplementedBuilder, "load", load),  # of what DeepSpeed's CPU lacks, such as Lion
        (OpBuilder, "is_compatible", lambda self, verbose=False: True),
        (communication, "build_shm_op", lambda: None),  # the CPU's all-reduce in shared memory
    ]


def forget_process_groups() -> None:
    """Destroy torch's process groups, and reset DeepSpeed's to their state at its import."""
    import deepspeed.comm.comm
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    importlib.reload(sys.modules["deepspeed.utils.groups"])


def make_process_group(size: int, device_type: str, rank: int = 0) -> None:
    """Initialise a process group of `size` ranks, as one of them; its collectives do nothing."""
    import torch.distributed

    # Registers the backend.
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    store = fake.FakeStore()
    torch.distributed.Backend.backend_capability[FAKE_GROUP] = ["cpu", "cuda", device_type]
    torch.distributed.init_process_group(FAKE_GROUP, store=store, rank=rank, world_size=size)
    collectives.take_fake_tensors()


def partition_in_stage_3(model: torch.nn.Module, config: Mapping[str, Any]) -> None:
    """Partition a model in stage 3, as `zero.Init` does while a script makes it."""
    import deepspeed.comm

    if read_strategy(config).stage != 3:
        return
    zero: Any = importlib.import_module("deepspeed.runtime.zero")
    deepspeed.comm.init_distributed(verbose=False)
    zero.Init(module=model, config_dict_or_path=config)


def ulysses_groups(module: torch.nn.Module, *, size: int, micro_batch: int) -> Any:
    """Divide the attention of a transformers model; return the `mpu` for `deepspeed.initialize`.

    Raises:
        SimulationUnsupported: the model's configuration names no attention kernel.
    """
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    kernel = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if kernel is None:
        raise SimulationUnsupported("sequence parallelism of a model from outside transformers")
    deepspeed.comm.init_distributed(get_accelerator().communication_backend_name())
    return UlyssesSPAttentionHF.register_with_transformers(
        module,
        core_attn_implementation=kernel,
        sequence_parallel_size=size,
        micro_batch_size=micro_batch,
    )


def _patch_moves(tracker: StorageTracker, device_type: str) -> None:
    """Patch `Module.to`: moved tensors are no longer parked on the host (see `StorageTracker`)."""
    original = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == device_type:
            for tensor in (*self.parameters(), *self.buffers()):
                if isinstance(tensor, FakeTensor) and tracker.is_parked(tensor):
                    tensor.data = torch.empty_like(tensor)
        return self if dtype is None else original(self, dtype)

    torch.nn.Module.to = to  # type: ignore[assignment,method-assign]
