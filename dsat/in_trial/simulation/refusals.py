"""Which configurations DeepSpeed refuses for what their settings say together.

    python3 -m dsat.in_trial.simulation.refusals QUESTIONS ANSWERS

reads `{"slots": n, "configs": [...]}` from a file, and writes into another, for each configuration,
DeepSpeed's own objection, or null. Types and names of single settings are known before (see
`dsat.in_trial.deepspeed_schema`). What is wrong with several of them only DeepSpeed itself says,
in two places: `DeepSpeedConfig`, and the constructors of engines and of ZeRO's optimizers. So each
configuration is read by the one, and then an engine is made with it, of a model of two layers, on
fake tensors. No rule of DeepSpeed's is written down here.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import gc
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dsat.inputs.ds_config import AUTO, BATCH_KEYS
from dsat.values.files import write_atomically
from dsat.values.zero_strategy import NVME

# What an engine of two layers can be made with: other sections concern the model itself, or write
# and send (monitors, checkpoints) as soon as there is an engine.
_OF_ENGINES = frozenset(
    """
    bf16 bfloat16 communication_data_type compile data_types fp16 gradient_accumulation_dtype
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
    managed_gradient_accumulation optimizer prescale_gradients torch_autocast
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """.split()
)
# Optimizers that need parameters of a kind, or operators that exist only where they are compiled.
_ANY_PARAMETERS = frozenset("adam adamw sgd adagrad rmsprop nadam radam lion lamb".split())
_CONTROL: Mapping[str, Any] = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
_WIDTH = 64
_MOST_CHARACTERS = 300


def objections(configs: list[dict[str, Any]], slots: int) -> list[str | None]:
    """DeepSpeed's objection to each configuration; None if it has none."""
    found = [_objection_to_reading(config) for config in configs]
    if not any(_may_make_engine(c) for c, said in zip(configs, found, strict=True) if said is None):
        return found
    importlib.import_module("dsat.in_trial.simulation.warm")
    gc.collect()
    gc.freeze()  # not to be looked through again in each process
    if _objection_to_engine(_CONTROL, slots) is not None:
        return found  # engines cannot be made here in this way, whatever their configuration
    for number, config in enumerate(configs):
        if found[number] is None and _may_make_engine(config):
            found[number] = _objection_to_engine(config, slots)
    return found


def _objection_to_reading(config: Mapping[str, Any]) -> str | None:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(_to_be_read(config, slots=1))
    except Exception as error:
        return _said(error)
    return None


def _may_make_engine(config: Mapping[str, Any]) -> bool:
    zero = config.get("zero_optimization") or {}
    devices = [(zero.get(f"offload_{part}") or {}).get("device") for part in ("optimizer", "param")]
    kind = str((config.get("optimizer") or {}).get("type", "")).lower()
    # Swapping to NVMe begins with files, and what a script passes as its optimizer is not known.
    return NVME not in devices and kind in _ANY_PARAMETERS


def _objection_to_engine(config: Mapping[str, Any], slots: int) -> str | None:
    """In a process of its own, which is changed for fake tensors for good."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _make_engine(config, slots, writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        said = file.read()
    os.waitpid(child, 0)
    return said or None


def _make_engine(config: Mapping[str, Any], slots: int, writer: int) -> NoReturn:
    """Makes one, and writes DeepSpeed's objection, if it has one; never returns."""
    status = 0
    try:
        with _made_by_deepspeed(writer):
            _engine(config, slots)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)


@contextlib.contextmanager
def _made_by_deepspeed(writer: int) -> Iterator[None]:
    """Takes an error for an objection if DeepSpeed raises it itself; others may be those of fakes.

    Its readers check with pydantic, in a frame of another package.
    """
    import deepspeed
    from pydantic import ValidationError

    own = os.path.dirname(deepspeed.__file__) + os.sep
    try:
        yield
    except Exception as error:
        is_own = _is_raised_in(own, error) and bool(str(error))
        if not isinstance(error, ValidationError) and not is_own:
            raise
        os.write(writer, _said(error).encode())


def _is_raised_in(folder: str, error: BaseException) -> bool:
    """Whether a statement in a file of the folder raised it, and nothing that is called there."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    assert last is not None
    code = last.tb_frame.f_code
    is_statement = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_statement and code.co_filename.startswith(folder)


def _engine(config: Mapping[str, Any], slots: int) -> None:
    import deepspeed
    import torch

    from dsat.in_trial.simulation.module_snapshot import ModuleSnapshot
    from dsat.in_trial.simulation.simulation import Candidate, Captured, Simulation

    model = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Linear(_WIDTH, _WIDTH))
    read = _to_be_read(config, slots)
    captured = Captured(
        initialize=deepspeed.initialize,
        arguments={"model": model, "model_parameters": list(model.parameters())},
        snapshot=ModuleSnapshot(model),
        micro_batch=1,
        dtype=torch.float32,
    )
    candidate = Candidate(
        config={key: value for key, value in read.items() if key in _OF_ENGINES},
        micro_batch=1,
        slots=slots,
        as_cpu=False,
        workspace_bytes=0,
    )
    Simulation(captured, candidate)


def _to_be_read(config: Mapping[str, Any], slots: int) -> dict[str, Any]:
    """With batch sizes that fit each other: whether the user's do is known before."""
    gas = config.get("gradient_accumulation_steps")
    gas = gas if isinstance(gas, int) and gas > 0 else 1
    batch = dict(zip(BATCH_KEYS, (gas * slots, 1, gas), strict=True))
    return {**_without_auto(config), **batch}


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """What whoever reads "auto" puts in its place is not known; DeepSpeed's default will do."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in config.items()
        if value != AUTO
    }


def _said(error: Exception) -> str:
    """An objection in one line."""
    from pydantic import ValidationError

    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
        text += first["msg"].partition(", ")[2] or first["msg"]
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def main() -> None:
    logging.disable(logging.WARNING)
    questions, answers = map(Path, sys.argv[1:3])
    asked = json.loads(questions.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):  # libraries print what they like
        found = objections(asked["configs"], asked["slots"])
    write_atomically(answers, json.dumps(found))


if __name__ == "__main__":
    main()
