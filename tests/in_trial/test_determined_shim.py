"""Determined without a master: what its own code finds there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dsat.in_trial import determined_shim
from dsat.in_trial.determined_shim import LocalTask


def test_determineds_callback_needs_no_searcher_in_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from determined import _info, core
    from determined.transformers import DetCallback

    config = {"searcher": {"name": "custom"}}
    task = LocalTask(1, 1, {}, config, length=7, seed=0, folder=tmp_path, ports=())
    monkeypatch.setattr(_info, "_info", determined_shim._cluster_info(task))
    searcher = determined_shim._searcher_context(core.DummyDistributedContext(), task)
    arguments = SimpleNamespace(max_steps=6, overwrite_output_dir=True)
    callback = DetCallback(SimpleNamespace(searcher=searcher), arguments)
    assert (callback.searcher_unit, callback.searcher_max_length) == ("batches", 7)
