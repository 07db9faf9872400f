"""Memory of a model of seven billion parameters, on a machine that could not hold it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsat.values.zero_strategy import Strategy

pytestmark = pytest.mark.slow

GIB = 2**30
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.mark.nightly
def test_llama_7b_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_7B))
    options = ["--slot-memory", "80GiB", "--slots", "1", "8", "64", "--json"]
    target = ["--hf-config", "model", "--seq-length", "2048"]
    words = [sys.executable, "-m", "dsat", "estimate", *options, *target]
    with subprocess.Popen(
        words, cwd=tmp_path, env=_environment(tmp_path), stdout=subprocess.PIPE, text=True
    ) as process:
        largest: list[int] = []
        watcher = threading.Thread(target=lambda: largest.append(max(_sizes(process))))
        watcher.start()
        said, _ = process.communicate()
    watcher.join()
    assert process.returncode == 0
    assert largest[0] < 2 * GIB
    found = json.loads(said)
    assert found["model"]["num_params"] == 6_738_415_616
    peaks = {(x["strategy"], x["slots"]): x["peak_bytes"] for x in found["lines"]}
    assert len(peaks) == 7 * 3
    # Alone on its slot, stage 3 holds 18 bytes of state for each parameter, and activations.
    stage_3 = [peaks[Strategy(3).name, slots] for slots in (1, 8, 64)]
    assert stage_3[0] > 16 * 6.7e9
    assert stage_3 == sorted(stage_3, reverse=True)


def _environment(folder: Path) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": root, "XDG_CACHE_HOME": str(folder / "cache")}


def _sizes(process: subprocess.Popen[str]) -> Iterator[int]:
    """Memory of a process and all that it starts, shared pages counted once, until it ends."""
    yield 0
    while process.poll() is None:
        total = 0
        for part in [process.pid, *_descendants(process.pid)]:
            try:
                total += psutil.Process(part).memory_full_info().pss
            except psutil.Error:
                continue
        yield total
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            continue


def _descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
