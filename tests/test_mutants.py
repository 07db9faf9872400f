"""The catalogue of the mutation gate fits the code."""

from __future__ import annotations

import pytest

from testing.mutants.catalogue import Mutation, load


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.id)
def test_a_mutation_changes_one_place_of_the_product(mutation: Mutation) -> None:
    """The tests that must catch the mutation must exist, too."""
    assert not mutation.problem()
