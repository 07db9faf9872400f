"""The ramp of the user's own micro batch, before a search begins."""

from __future__ import annotations

from dataclasses import replace

from testing.helpers import ran
from testing.search_contract import Driven, proposals_of, space_of


def ramping() -> Driven:
    space = space_of(1, micro_batches=range(1, 1025))
    return Driven("binary", space, ceiling=1000, ramp=True)


def test_it_rises_until_throughput_no_longer_grows() -> None:
    """It goes on growing up to 64 samples; beyond, the search bisects what is open."""
    search = ramping()
    search.observe(4, ran(4.0))
    asked = proposals_of(search, lambda p: ran(float(min(p.micro_batch, 64))), limit=4)
    sizes = [proposal.micro_batch for proposal in asked]
    assert sizes[:3] == [16, 64, 256]
    assert 512 < sizes[3] < 1000


def test_it_ends_where_the_data_end() -> None:
    search = ramping()
    search.observe(4, replace(ran(4.0), most_samples=40))
    asked = proposals_of(
        search, lambda p: replace(ran(float(p.micro_batch)), most_samples=40), limit=6
    )
    sizes = [proposal.micro_batch for proposal in asked]
    assert sizes[:2] == [16, 32] and max(sizes) <= 40
