"""The table of adapters: all functions and methods that dsat wraps in a user's process."""

from __future__ import annotations

import functools

from dsat.in_trial import loaders, precision
from dsat.in_trial.adapters import deepspeed_calls as engine
from dsat.in_trial.adapters import (
    determined_shim,
    files,
    launchers,
    lightning_trainer,
    torch_calls,
    trackers,
)
from dsat.in_trial.adapters import hf_trainer as hf
from dsat.in_trial.adapters.calls import Adapter
from dsat.in_trial.adapters.trial import IN_LOCAL_PROCESSES, IN_LOCAL_TRIALS, IN_TRIALS

_in_trials = functools.partial(Adapter, phases=IN_TRIALS)
_locally = functools.partial(Adapter, phases=IN_LOCAL_TRIALS)
_in_processes = functools.partial(Adapter, phases=IN_LOCAL_PROCESSES)

_PYTHON = (
    Adapter("argparse", "_ActionsContainer.add_argument", launchers.add_argument),
    Adapter("argparse", "ArgumentParser._parse_known_args", launchers.parse_arguments),
    _locally("multiprocessing.process", "BaseProcess.run", launchers.run_process),
    _locally("sys", "exit", launchers.exit_process),
    _locally("os", "_exit", launchers.leave_process),
    Adapter("sys", "excepthook", launchers.report_uncaught),
)

_RUNNERS = "PDSHRunner OpenMPIRunner MPICHRunner IMPIRunner SlurmRunner MVAPICHRunner".split()
_LAUNCHERS = (
    _locally("torch.distributed.launcher.api", "launch_agent", launchers.refuse_nodes),
    *(
        _locally("deepspeed.launcher.multinode_runner", f"{name}.get_cmd", launchers.refuse_nodes)
        for name in _RUNNERS
    ),
    *(
        Adapter(
            f"{package}.plugins.environments.lightning",
            "LightningEnvironment.creates_processes_externally",
            launchers.starts_ranks,
        )
        for package in ("lightning.fabric", "lightning_fabric")
    ),
)

_TORCH = (
    _in_trials("torch.utils.data.dataloader", "DataLoader.__iter__", loaders.begin_epoch),
    _in_trials("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", loaders.get_batch),
    _in_trials("torch.amp.autocast_mode", "autocast.__enter__", precision.enter_autocast),
    _in_trials("torch.autograd", "backward", torch_calls.backward),
    Adapter("torch.distributed.rendezvous", "TCPStore", torch_calls.open_store),
)

_DEEPSPEED = (
    Adapter("deepspeed", "initialize", engine.initialize),
    Adapter("deepspeed.runtime.zero.partition_parameters", "Init.__init__", engine.open_zero_init),
    Adapter("deepspeed.ops.op_builder.builder", "OpBuilder.jit_load", engine.compile_operator),
    _in_trials(
        "deepspeed.accelerator.cuda_accelerator",
        "CUDA_Accelerator.available_memory",
        engine.available,
    ),
    _locally("deepspeed.runtime.engine", "DeepSpeedEngine.load_checkpoint", files.load_checkpoint),
)

# Wrapped in each engine that may train, not in the class: subclasses have their own methods.
ENGINE = (
    *(
        _in_trials("deepspeed.runtime.engine", f"DeepSpeedEngine.{name}", engine.measure(name))
        for name in ("forward", "backward", "step")
    ),
    _in_trials("deepspeed.runtime.engine", "DeepSpeedEngine.scale", engine.scale, ">=0.18.3"),
)

# Wrapped only if `--slot-memory` limits ranks on CPU cores that are not forked.
MODELS = _locally("torch.nn.modules.module", "Module.__init__", torch_calls.build_model)

_FILES = (
    *(_in_processes("os", name, files.remove) for name in ("remove", "unlink", "rmdir")),
    _in_processes("shutil", "rmtree", files.remove),
    *(_in_processes("os", name, files.move) for name in ("rename", "replace")),
    *(_in_processes("os", name, files.change) for name in ("truncate", "chmod", "chown", "utime")),
    _in_processes("os", "mkdir", files.create("path", 0)),
    _in_processes("os", "symlink", files.create("dst", 1)),
    _in_processes("builtins", "open", files.open_file),
    _in_processes("io", "open", files.open_file),
    _in_processes("safetensors", "safe_open", files.read),
)

_TRAINERS = (
    Adapter("transformers.training_args", "TrainingArguments.__post_init__", hf.check_arguments),
    _locally("transformers.trainer", "Trainer.train", hf.train),
    _locally("transformers.trainer_callback", "TrainerControl.__setattr__", hf.control),
    Adapter("accelerate.utils.dataclasses", "DeepSpeedPlugin.__post_init__", hf.check_plugin),
    Adapter("accelerate.state", "PartialState._prepare_backend", hf.prepare_backend),
    *(
        Adapter(
            f"{package}.strategies.deepspeed", "DeepSpeedStrategy.setup", lightning_trainer.set_up
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
)

_DETERMINED = (
    Adapter("determined._info", "get_cluster_info", determined_shim.get_cluster_info),
    Adapter("determined.core._context", "init", determined_shim.init),
    Adapter("determined.core._distributed", "DistributedContext.__init__", determined_shim.connect),
    Adapter("determined.ipc", "ZMQBroadcastServer.__init__", determined_shim.serve),
    Adapter("determined.util", "write_user_code", determined_shim.write_user_code),
    Adapter(
        "determined.pytorch.deepspeed._deepspeed_context",
        "DeepSpeedTrialContext._init_device",
        determined_shim.choose_device,
    ),
)

# Functions and methods that save or load checkpoints; an engine returns whether it saved.
_CHECKPOINTS = (
    _in_processes("deepspeed.runtime.engine", "DeepSpeedEngine.save_checkpoint", files.skip),
    _in_processes("deepspeed.runtime.engine", "DeepSpeedEngine.save_16bit_model", files.skip),
    _in_processes("deepspeed.runtime.engine", "DeepSpeedEngine.save_fp16_model", files.skip),
    _in_processes("accelerate.accelerator", "Accelerator.save_state", files.skip),
    _in_processes("accelerate.accelerator", "Accelerator.save_model", files.skip),
    _in_processes("accelerate.accelerator", "Accelerator.load_state", files.skip),
    _in_processes("transformers.trainer", "Trainer.save_model", files.skip),
    _in_processes("transformers.trainer", "Trainer.save_state", files.skip),
    _in_processes("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint", files.skip),
    _in_processes("pytorch_lightning.trainer.trainer", "Trainer.save_checkpoint", files.skip),
    _in_processes("torch.distributed.checkpoint.state_dict_saver", "save", files.skip),
    _in_processes("torch.distributed.checkpoint.state_dict_saver", "async_save", files.skip),
    _in_processes("torch.distributed.checkpoint.state_dict_saver", "save_state_dict", files.skip),
)

_TO_FILE = (
    _in_processes("torch.serialization", "save", files.save("f", 1)),
    _in_processes("torch.jit._serialization", "save", files.save("f", 1)),
    _in_processes("safetensors.torch", "save_file", files.save("filename", 1)),
    _in_processes("safetensors.numpy", "save_file", files.save("filename", 1)),
)
_TO_FOLDER = tuple(
    _in_processes(module, f"{name}.save_pretrained", files.save("save_directory", 0), versions)
    for module, name, versions in (
        ("transformers.modeling_utils", "PreTrainedModel", ""),
        ("transformers.configuration_utils", "PretrainedConfig", "<5"),
        ("transformers.configuration_utils", "PreTrainedConfig", ">=5"),
        ("transformers.generation.configuration_utils", "GenerationConfig", ""),
        ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", ""),
        ("transformers.feature_extraction_utils", "FeatureExtractionMixin", ""),
        ("transformers.image_processing_base", "ImageProcessingMixin", ""),
        ("transformers.processing_utils", "ProcessorMixin", ""),
        ("peft.peft_model", "PeftModel", ""),
        ("diffusers.models.modeling_utils", "ModelMixin", ""),
        ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", ""),
    )
)
_TRACKERS = (
    _in_processes(
        "torch.utils.tensorboard.writer", "SummaryWriter.__init__", trackers.log_in_trial("log_dir")
    ),
    _in_processes("tensorboardX.writer", "SummaryWriter.__init__", trackers.log_in_trial("logdir")),
    _in_processes("mlflow.tracking.client", "MlflowClient.__init__", trackers.connect_client),
    _in_processes("mlflow", "set_tracking_uri", trackers.set_address),
    _in_processes("wandb", "init", trackers.start_run),
    _in_processes("hydra._internal.hydra", "Hydra.run", trackers.run_hydra),
    _in_processes("hydra._internal.hydra", "Hydra.multirun", trackers.run_hydra),
)

TABLE: tuple[Adapter, ...] = (
    *_PYTHON,
    *_LAUNCHERS,
    *_FILES,
    *_TORCH,
    *_DEEPSPEED,
    *_TRAINERS,
    *_DETERMINED,
    *_CHECKPOINTS,
    *_TO_FILE,
    *_TO_FOLDER,
    *_TRACKERS,
)
