"""The folder of wheels for a machine without a network contains all that dsat needs there."""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.wheels import BINARY, PURE, RESOLVED, SOURCE


def needed_by(name: str) -> set[str]:
    found = [Requirement(text) for text in requires(name) or ()]
    usual = [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {canonicalize_name(each.name) for each in usual}


def test_what_is_needed_besides_torch_is_among_them() -> None:
    there = {canonicalize_name(each) for each in (*BINARY, *PURE, *RESOLVED, *SOURCE, "torch")}
    for name in ("deepspeed-autotune", "deepspeed", "pydantic", "rich"):
        assert needed_by(name) <= there | needed_by("torch"), name
