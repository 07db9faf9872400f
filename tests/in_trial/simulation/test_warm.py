"""What simulations find imported, and what not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from testing.versions import needs

_CODE = """
import json, sys
import torch
from dsat.in_trial.simulation import warm
before = [name in sys.modules for name in ("torch._inductor.compile_fx", "deepspeed.runtime.engine",
          "deepspeed.runtime.zero.muon.original_muon")]
compiled = []
def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward
def double(x):
    return x + x
with warm._compiled_when_called():
    plain = torch.compile(double, backend=backend)
    decorated = torch.compile(backend=backend)(double)
counts, sums = [len(compiled)], []
for function in (plain, plain, decorated):
    sums.append(float(function(torch.ones(3)).sum()))
    counts.append(len(compiled))
print(json.dumps([before, counts, sums, torch.compile.__module__]))
"""


@pytest.mark.slow
@needs("deepspeed", "0.17.6", "has no Muon, with which DeepSpeed would import the compiler")
def test_engines_are_imported_and_the_compiler_only_where_something_is_compiled() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    before, counts, sums, module = json.loads(run.stdout.splitlines()[-1])
    assert before == [False, True, True]
    assert counts[:3] == [0, 1, 1] and sums == [6.0, 6.0, 6.0]
    assert module == "torch"
