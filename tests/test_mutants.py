"""The catalogue of the mutation gate fits the product."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from testing.mutants.catalogue import ROOT, Mutation, load
from testing.mutants.reach import instrument

MUTATIONS = load()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_a_mutation_changes_one_place_of_the_product(mutation: Mutation) -> None:
    assert not mutation.problem()


def test_each_mutation_is_recorded_where_it_is_reached(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dsat", tmp_path / "dsat")
    instrument(tmp_path, MUTATIONS, tmp_path / "record")
    recorded = set[str]()
    for path in (tmp_path / "dsat").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        ast.parse(text)
        recorded |= set(re.findall(r"mutant_recorder.*reach\((\d+)\)", text))
    assert recorded == {str(number) for number in range(len(MUTATIONS))}
