"""Configurations of models, and the DeepSpeed configuration made from them."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsat.command import ds_config, hf_config
from dsat.command.ds_config import BATCH_KEYS

AUTO = {"enabled": "auto"}


@pytest.mark.parametrize(
    ("dtype", "given", "trained"),
    [
        ("fp16", {"bf16": AUTO, "fp16": AUTO}, "fp16"),
        (None, {"bf16": AUTO, "fp16": AUTO}, "bf16"),
        (None, {"bf16": {"enabled": False}, "fp16": AUTO}, "fp16"),
        (None, {"bf16": AUTO, "fp16": {"enabled": False}}, "bf16"),
        (None, {"fp16": {"enabled": True}}, "fp16"),
        (None, {"bf16": {"enabled": True}, "fp16": AUTO}, "bf16"),
        (None, {"bf16": {"enabled": False}}, "fp32"),
        (None, {}, "fp32"),
        (None, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "fp32"),
        (None, {"fp16": {"loss_scale": 0}}, "fp32"),
        ("bf16", {"fp16": {"enabled": False}}, "bf16"),
    ],
)
def test_the_users_file_decides_what_is_trained(
    dtype: str | None, given: Mapping[str, Any], trained: str
) -> None:
    config = hf_config.ds_config(dtype, {**given, "gradient_clipping": "auto"})
    assert hf_config.dtype_of(config) == trained
    assert [config[name]["enabled"] for name in ("bf16", "fp16")].count(True) <= 1


def test_what_a_trainer_would_fill_in_is_left_to_deepspeed() -> None:
    given = {
        **dict.fromkeys((*BATCH_KEYS, "gradient_clipping"), "auto"),
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto"},
    }
    config = hf_config.ds_config("bf16", given)
    assert "auto" not in json.dumps(config)
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-4}}
    assert config["zero_optimization"] == {"stage": 3}
    assert [config.get(key) for key in BATCH_KEYS] == [None, 1, 1]


def test_what_a_trainer_computes_from_the_hidden_size_is_computed() -> None:
    """The expected sizes are those of `HfTrainerDeepSpeedConfig.trainer_config_finalize`."""
    computed = {
        "reduce_bucket_size": 10**6,
        "stage3_prefetch_bucket_size": 900_000,
        "stage3_param_persistence_threshold": 10_000,
    }
    given = {"zero_optimization": {"stage": 3, **dict.fromkeys(computed, "auto")}}
    config = hf_config.ds_config("bf16", given)
    found = ds_config.fill_in_sizes(config["zero_optimization"], 1000)
    assert found == {"stage": 3, **computed}
    own = {"stage": 3, "reduce_bucket_size": 5}
    assert ds_config.fill_in_sizes(own, 1000) == own
    auto = given["zero_optimization"]
    assert ds_config.fill_in_sizes(auto, None) == auto


def test_a_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Configurations of Mamba-2 contain an infinity, and some on the Hub contain a key twice."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba2", "use_cache": 1, "use_cache": 0, "limit": Infinity}')
    assert hf_config.find(str(tmp_path)) == hf_config.find(str(path)) == path


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub with one model, `org/tiny`."""

    body = b'{"model_type": "llama"}'

    def do_HEAD(self) -> None:
        found = self.path == "/org/tiny/resolve/main/config.json"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(self.body) if found else 0))
        if found:
            self.send_header("ETag", '"0123"')
            self.send_header("X-Repo-Commit", "4567")
        else:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_once(hub: str, tmp_path: Path) -> None:
    code = "import sys; from dsat.command import hf_config; print(hf_config.find(sys.argv[1]))"

    def find(model: str, endpoint: str) -> subprocess.CompletedProcess[str]:
        variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", code, model],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )

    first = find("org/tiny", hub)
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    assert path.name == "config.json" and path.read_bytes() == Hub.body
    assert find("org/tiny", "http://127.0.0.1:9").stdout == first.stdout, "from the cache"
    other = find("org/other", hub)
    assert other.returncode and "UserInputError: --model org/other: " in other.stderr
