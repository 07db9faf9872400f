"""Settings of a search from the command line or from Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsat.engines import places
from dsat.errors import UserInputError
from dsat.options import OWN, Option, options_of
from dsat.search import SEARCHES, parameters_of, usual_options
from dsat.search import options_of as options_of_search
from dsat.tuning.settings import DEFAULT_METHOD, Settings
from dsat.values.codec import encode

# Of `dsat tune` and `dsat.tune`. `dsat asha` and the like have the defaults of Determined's dsat.
_DEFAULTS_OF_TUNE = {"metric": "throughput", "train_batch_size": OWN}


def all_options(method: str | None = None, engines: Iterable[str] = ()) -> Iterator[Option]:
    """Yield the options of a search by `method`, or of `dsat tune` if `method` is None.

    `engines` are names of engines that the user registered.
    """
    for declared in options_of(Settings):
        if declared.name == "engine":
            yield replace(declared, choices=(*places.ENGINE_NAMES, *engines))
        elif declared.name == "method":
            if method is None:
                yield replace(declared, choices=tuple(SEARCHES))
        elif method is None and declared.name in _DEFAULTS_OF_TUNE:
            yield replace(declared, default=_DEFAULTS_OF_TUNE[declared.name])
        else:
            yield declared
    yield from places.options()
    if method is not None:
        yield from options_of_search(method).values()
        return
    named: dict[str, Option] = {}
    methods: dict[str, list[str]] = {}
    for name in SEARCHES:
        for own in options_of_search(name).values():
            named.setdefault(own.keyword, own)
            methods.setdefault(own.keyword, []).append(name)
    for keyword, own in named.items():
        yield replace(own, help=f"({', '.join(methods[keyword])}) {own.help}")


def make_settings(
    values: Mapping[str, Any],
    given: Mapping[str, str],
    *,
    keeps_batch: bool,
    search_options: Mapping[str, Any] | None = None,
) -> Settings:
    """Make the settings of a search.

    Args:
        values: the user's values, by name of setting; options of methods and places by keyword.
        given: the flag or keyword of each value, for messages.
        keeps_batch: whether to use the defaults of `dsat tune`: throughput, own global batch.
        search_options: further arguments of the search's constructor, declared as options or not.

    Raises:
        UserInputError: the method or an option of it is unknown, or values contradict each other.
    """
    left = dict(values)
    method = left.get("method", DEFAULT_METHOD)
    if method not in SEARCHES:
        raise UserInputError(
            f"invalid choice: {method!r} (choose from {', '.join(SEARCHES)})",
            where=given.get("method", "method"),
        )
    of_methods = {own.keyword for name in SEARCHES for own in options_of_search(name).values()}
    of_method = {own.keyword: name for name, own in options_of_search(method).items()}
    own = usual_options(method)
    for keyword in sorted(of_methods & left.keys()):
        value = left.pop(keyword)
        if keyword not in of_method:
            raise UserInputError(
                f"is not an option of method {method}",
                where=given.get(keyword, keyword),
                hint="Remove it, or choose a method that has it.",
            )
        own[of_method[keyword]] = value
    if unknown := sorted(set(search_options or {}) - parameters_of(method)):
        known = ", ".join(sorted(parameters_of(method)))
        raise UserInputError(
            f"method {method!r} takes no {unknown[0]!r} (choose from {known})",
            where="search_options",
        )
    try:  # convert to the values that a resumed run reads from its journal
        recorded = json.loads(json.dumps(encode(search_options or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserInputError(f"cannot be recorded: {error}", where="search_options") from None
    of_places = {one.keyword: left.pop(one.keyword, None) for one in places.options()}
    if keeps_batch:
        if "max_train_batch_size" in left:
            left.setdefault("train_batch_size", None)
        left = {**_DEFAULTS_OF_TUNE, **left}
    return Settings(
        **left,
        search_options={**own, **recorded},
        place_options=places.given_options(of_places, left.get("engine", places.AUTO)),
        given=given,
    )
