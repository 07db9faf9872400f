"""Each search method's own options; declared here, and only here, as the others in `settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.inputs.option import FRACTION, POSITIVE_NUMBER, Group, Option, at_least


def _early_stopping(what: str) -> Option:
    return Option(
        ("--early-stopping",),
        what,
        at_least(1),
        metavar="N",
        plan_field="search_options",
        group=Group.METHOD,
    )


def _own(flag: str, what: str, **attributes: Any) -> Option:
    return Option((flag,), what, plan_field="search_options", group=Group.METHOD, **attributes)


_NO_NEW_BEST = _early_stopping("end the search after N trials without a new best")
_RANGE_FACTOR = _own(
    "--search-range-factor",
    "search up to the largest micro batch that is predicted to fit, times X; by default up to "
    "where doubling your own micro batch is no longer worth it",
    kind=POSITIVE_NUMBER,
    metavar="X",
)

# Each method's own options, by the parameter of the search that takes their values.
SEARCH_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "model": {
        "stop_when": _own(
            "--stop-when",
            "end the search when three more minutes of it are expected to gain less than GAIN, "
            "by what each trial would take; 0 for never",
            kind=FRACTION,
            default="2%",
            metavar="GAIN",
        ),
        "early_stopping": _NO_NEW_BEST,
    },
    "asha": {
        "max_rungs": _own(
            "--max-rungs", "number of rungs", kind=at_least(1), default=5, metavar="N"
        ),
        "min_trials": _own(
            "--min-binary-search-trials",
            "trials that every drawn configuration gets",
            kind=at_least(1),
            default=3,
            metavar="N",
        ),
        "early_stopping": _own(
            "--asha-early-stopping",
            "smallest rate of early stopping (`s` in arXiv:1810.05934)",
            kind=at_least(0),
            default=0,
            metavar="N",
        ),
        "divisor": _own(
            "--divisor",
            "1/divisor of the configurations go on to the next rung, with divisor times as many "
            "trials (`eta` in arXiv:1810.05934)",
            kind=at_least(2),
            default=2,
            metavar="N",
        ),
        "search_range_factor": _RANGE_FACTOR,
    },
    "binary": {"search_range_factor": _RANGE_FACTOR},
    "random": {
        "trials_per_config": _own(
            "--trials-per-random-config",
            "the most trials of one drawn configuration",
            kind=at_least(1),
            default=5,
            metavar="N",
        ),
        "early_stopping": _NO_NEW_BEST,
        "search_range_factor": _RANGE_FACTOR,
    },
    "gridsearch": {
        "num_micro_batches": _own(
            "--num-micro-batches",
            "leave a setting after N micro batches that ran: the smallest first where only some "
            "are allowed, as divisors of --train-batch-size are, else from the largest power of "
            "two that should fit (default: all)",
            kind=at_least(1),
            metavar="N",
        ),
        "early_stopping": _early_stopping(
            "leave a ZeRO stage after N trials without a better one in it"
        ),
    },
}


def default_search_options(method: str) -> dict[str, Any]:
    """What a search gets if the user says nothing."""
    return {name: own.initial for name, own in SEARCH_OPTIONS.get(method, {}).items()}
