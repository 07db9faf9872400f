"""The table of adapters: everything that dsat changes in a user's process."""

from __future__ import annotations

from dsat.in_trial.adapters import deepspeed_calls, files, trackers
from dsat.in_trial.adapters.calls import Adapter
from dsat.in_trial.adapters.trial import IN_TRIALS

_TRAINER_MODULES = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")

_DEEPSPEED = (
    Adapter("deepspeed", "initialize", deepspeed_calls.initialize),
    Adapter(
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.load_checkpoint",
        files.load_checkpoint,
        "",
        IN_TRIALS,
    ),
)

_FILES = (
    *(Adapter("os", name, files.remove, "", IN_TRIALS) for name in ("remove", "unlink", "rmdir")),
    Adapter("shutil", "rmtree", files.remove, "", IN_TRIALS),
    *(Adapter("os", name, files.move, "", IN_TRIALS) for name in ("rename", "replace")),
    *(Adapter("os", name, files.change, "", IN_TRIALS) for name in ("truncate", "chmod", "utime")),
    Adapter("os", "mkdir", files.create("path", 0), "", IN_TRIALS),
    Adapter("os", "symlink", files.create("dst", 1), "", IN_TRIALS),
    Adapter("builtins", "open", files.open_file, "", IN_TRIALS),
    Adapter("io", "open", files.open_file, "", IN_TRIALS),
    Adapter("safetensors", "safe_open", files.read, "", IN_TRIALS),
)

# Functions and methods that write checkpoints or resume; an engine says whether it has saved.
_CHECKPOINTS = tuple(
    Adapter(module, name, files.skip, versions, IN_TRIALS)
    for module, versions, names in (
        ("deepspeed.runtime.engine", "", ("DeepSpeedEngine.save_checkpoint",)),
        ("deepspeed.runtime.engine", "", ("DeepSpeedEngine.save_16bit_model",)),
        ("deepspeed.runtime.engine", "", ("DeepSpeedEngine.save_fp16_model",)),
        ("accelerate.accelerator", "", ("Accelerator.save_state", "Accelerator.save_model")),
        ("accelerate.accelerator", "", ("Accelerator.load_state",)),
        ("transformers.trainer", "", ("Trainer.save_model", "Trainer.save_state")),
        *((module, "", ("Trainer.save_checkpoint",)) for module in _TRAINER_MODULES),
        ("torch.distributed.checkpoint.state_dict_saver", "", ("save", "async_save")),
        ("torch.distributed.checkpoint.state_dict_saver", "", ("save_state_dict",)),
    )
    for name in names
)

_TO_FILE = tuple(
    Adapter(module, name, files.save(argument, 1), "", IN_TRIALS)
    for module, name, argument in (
        ("torch.serialization", "save", "f"),
        ("torch.jit._serialization", "save", "f"),
        ("safetensors.torch", "save_file", "filename"),
        ("safetensors.numpy", "save_file", "filename"),
    )
)
_TO_FOLDER = tuple(
    Adapter(module, f"{name}.save_pretrained", files.save("save_directory", 0), versions, IN_TRIALS)
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
_TRACKERS = tuple(
    Adapter(module, name, wrapper, "", IN_TRIALS)
    for module, name, wrapper in (
        (
            "torch.utils.tensorboard.writer",
            "SummaryWriter.__init__",
            trackers.log_in_trial("log_dir"),
        ),
        ("tensorboardX.writer", "SummaryWriter.__init__", trackers.log_in_trial("logdir")),
        ("mlflow.tracking.client", "MlflowClient.__init__", trackers.connect_client),
        ("mlflow", "set_tracking_uri", trackers.set_address),
        ("wandb", "init", trackers.start_run),
        ("hydra._internal.hydra", "Hydra.run", trackers.run_hydra),
    )
)

TABLE: tuple[Adapter, ...] = (
    *_DEEPSPEED,
    *_FILES,
    *_CHECKPOINTS,
    *_TO_FILE,
    *_TO_FOLDER,
    *_TRACKERS,
)
