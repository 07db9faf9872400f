"""What `dsat estimate` costs for models that this machine could not hold: prints a table.

    python3 -m benchmarks.large_models

Each with an empty cache, for 1, 8 and 64 slots, from a transformers configuration alone. Memory is
of all processes together, shared pages counted once; processor time is less noisy than the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

_GIB = 2**30
_SAMPLED_EVERY_S = 0.5
_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_7B: Mapping[str, Any] = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_70B: Mapping[str, Any] = {
    **_LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_LORA = ("--lora", "r=16,target=q_proj+v_proj")
CASES: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "Llama 7 B": (_7B, ()),
    "Llama 7 B, LoRA": (_7B, _LORA),
    "Llama 70 B": (_70B, ()),
}
_OPTIONS = "--seq-length 2048 --slot-memory 80GiB --slots 1 8 64 --json".split()


def main() -> None:
    print("| model | seconds | processor seconds | peak memory GiB |")
    print("|---|---:|---:|---:|")
    for name, (config, more) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            print(f"| {name} | {_measured(path, more)} |", flush=True)


def _measured(path: Path, more: tuple[str, ...]) -> str:
    words = [sys.executable, "-m", "dsat", "estimate", "--hf-config", str(path), *_OPTIONS, *more]
    env = {**os.environ, "XDG_CACHE_HOME": str(path.parent / "cache")}
    before, began = os.times(), time.perf_counter()
    with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _size(process.pid))
            time.sleep(_SAMPLED_EVERY_S)
    if process.returncode:
        raise SystemExit(f"dsat estimate ended with status {process.returncode}")
    took_s, after = time.perf_counter() - began, os.times()
    used_s = after.children_user + after.children_system
    used_s -= before.children_user + before.children_system
    return f"{took_s:.1f} | {used_s:.1f} | {peak / _GIB:.2f}"


def _size(pid: int) -> int:
    """Memory of a process and all that it has started, shared pages counted once."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


if __name__ == "__main__":
    main()
