"""Peak memory of real DeepSpeed ranks on this machine's CPU, counted in torch's allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testing.local import PATIENCE_S, PROGRAMS, environment_of_a_rank

FOLDER = PROGRAMS / "memory"
ROOT = Path(__file__).parents[1]


def counting_library(folder: Path) -> Path:
    """Compile `heap.c`, which counts the blocks that torch's CPU allocator holds."""
    library = folder / "heap.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(FOLDER / "heap.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


def real_peaks(library: Path, model: str, config: Mapping[str, Any], slots: int) -> dict[str, int]:
    """Train a model of `programs/memory`; return its peak bytes by phase, the maximum of all ranks.

    Raises:
        RuntimeError: the run failed; the message is the end of its log.
    """
    environment = environment_of_a_rank(
        WORLD_SIZE=str(slots), LOCAL_SIZE=str(slots), OMP_NUM_THREADS="1", LD_PRELOAD=str(library)
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        words = ["train.py", "--model", model, "--deepspeed_config", file.name]
        return measured(words, FOLDER, environment, slots)


def measured(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], slots: int = 1
) -> dict[str, int]:
    """Run a script on `slots` ranks; return its peak bytes by phase, the maximum of all ranks.

    Args:
        words: the script and its arguments.

    Raises:
        RuntimeError: the run failed; the message is the end of its log.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "measure.py"), *words],
            cwd=folder,
            env={
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "PYTHONPATH": f"{ROOT}:{environment.get('PYTHONPATH', '')}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(slots)
    ]
    logs = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    _remove_buffers(environment["MASTER_PORT"])
    found: list[dict[str, int]] = [
        json.loads(line[len("PEAKS ") :])
        for log in logs
        for line in log.splitlines()
        if line.startswith("PEAKS ")
    ]
    if len(found) < slots:
        raise RuntimeError(logs[0][-2000:])
    return {phase: max(peaks[phase] for peaks in found) for phase in found[0]}


def _remove_buffers(port: str) -> None:
    """Unlink the shared memory that DeepSpeed's CPU backend leaves behind."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        os.unlink(path)


def configuration(
    stage: int,
    *,
    micro_batch: int = 2,
    gas: int = 1,
    slots: int = 1,
    dtype: str = "bf16",
    accumulate: str | None = None,
    offload: str = "",
    bucket: int = 5_000_000,
    torch_adam: bool = False,
    low_state: bool = False,
) -> dict[str, Any]:
    """Build a DeepSpeed configuration.

    Args:
        offload: `optimizer`, `optimizer param`, or empty; always pinned.
        low_state: keep master weights, gradients and moments in bf16.
    """
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket}
    for section in offload.split():
        zero[f"offload_{section}"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": micro_batch * gas * slots,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": torch_adam}},
        "zero_optimization": zero,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if low_state:
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if accumulate is not None:
        config["data_types"] = {"grad_accum_dtype": accumulate}
    return config
