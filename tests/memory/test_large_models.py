"""Memory of a model of seven billion parameters, on a machine that could not hold it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsat.memory.estimate import SIMULATED
from dsat.values.zero_strategy import Strategy
from tests.conftest import ROOT

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


@pytest.mark.slow
@pytest.mark.nightly
def test_llama_7b_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_7B))
    options = ["--slot-memory", "80GiB", "--slots", "1", "--json"]
    target = ["--model", "model", "--seq-length", "2048"]
    words = [sys.executable, "-m", "dsat", "estimate", *options, *target]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    assert usage.ru_maxrss < 2 * 2**20  # KiB, of the largest of all its processes
    assert found["model"]["num_params"] == 6_738_415_616
    assert [line["memory"]["source"] for line in found["lines"]] == [SIMULATED] * 7
    peaks = {line["strategy"]: line["peak_bytes"] for line in found["lines"]}
    # Alone on its slot, stage 3 holds 18 bytes of state for each parameter, and activations.
    assert 16 * 6.7e9 < peaks[Strategy(3).name] < 24 * 6.7e9
