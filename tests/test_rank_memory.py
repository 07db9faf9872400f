"""The memory limit of a rank on the CPU, each time in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LIMITED = """
import subprocess
import sys

from deepspeed.ops.op_builder.builder import OpBuilder

from dsat.engines.local import rank


def compiled(self, verbose=True):
    subprocess.run([sys.executable, "-c", "bytearray(2**31)"], check=True)
    return "the operator"


OpBuilder.jit_load = compiled
rank._limit_memory(50 * 2**20)
"""


def after_the_limit(code: str) -> str:
    command = [sys.executable, "-c", LIMITED + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return (done.stderr or done.stdout).strip().splitlines()[-1]


def test_a_rank_gets_what_its_slot_has_and_no_more() -> None:
    assert after_the_limit("print(len(bytearray(40 * 2**20)))") == str(40 * 2**20)
    assert "MemoryError" in after_the_limit("bytearray(100 * 2**20)")


def test_the_compiler_of_an_operator_has_no_part_in_the_limit() -> None:
    load = "print(OpBuilder.jit_load(None, verbose=False))\n"
    assert after_the_limit(load) == "the operator"
    assert "MemoryError" in after_the_limit(load.replace("print", "") + "bytearray(100 * 2**20)")


def test_other_processes_of_the_script_share_the_limit() -> None:
    assert "CalledProcessError" in after_the_limit("compiled(None)")
