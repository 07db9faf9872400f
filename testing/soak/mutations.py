"""Damage to documents: to their values, structure and bytes."""

from __future__ import annotations

import copy
import random
from typing import Any

# Values that often break programs.
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 64, 2**31, 2**63 - 1, 2**63, -(2**63), 10**18, 10**400),
    *(0.0, 0.5, -0.0, 1.5, 1e308, -1e308, 5e-324, 1e18, 3.0),
    *("", " ", "auto", "all", "none", "cpu", "gpu", "nvme", "Adam", "1", "1e6", "true", "None"),
    *(
        "\x00",
        "a\x00b",
        "\ud800",
        "\udcff",
        "\x1b[2J",
        "../..",
        "/",
        "a" * 10_000,
        "é日本",
        "${HOME}",
    ),
    *([], [[]], {}, [1], [1, 2, 3], [None], ["a"], list(range(60)), [{}], {"a": 1}, {"": 0}),
    *({"type": "categorical", "vals": [1, 2]}, {"type": "const", "val": 1}, {"type": "int"}),
    *({"device": "cpu"}, {"device": "nvme", "nvme_path": 1}, {"stage": 3}, {"enabled": "auto"}),
)


def of_values(rng: random.Random, document: Any) -> Any:
    """Return a JSON document with one to three values replaced, moved, duplicated or deleted."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _mutate(rng, document)
    return document


def _mutate(rng: random.Random, document: Any) -> None:
    places = list(_places(document))
    if not places:
        return
    parent, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind <= 2:
        parent[key] = copy.deepcopy(rng.choice(HOSTILE))
    elif kind == 3:
        del parent[key]
    elif kind == 4:
        parent[key] = rng.choice(([parent[key]], {"a": parent[key]}, [parent[key], parent[key]]))
    elif isinstance(parent, dict):
        other, its = rng.choice(places)
        parent[str(rng.choice((its, "x", "é", "")))] = copy.deepcopy(other[its])
    else:
        parent.append(copy.deepcopy(rng.choice(HOSTILE)))


def _places(value: Any) -> Any:
    """Yield a (container, key) pair for every value below a value."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value, index
            yield from _places(value[index])


def of_text(rng: random.Random, text: str) -> bytes:
    """Return a text with some bytes changed, duplicated or lost, and sometimes very deep
    nesting."""
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(rng.choice((1, 2, 4, 8))):
        at = rng.randrange(len(content) + 1)
        kind = rng.randrange(7)
        if kind == 0 and content:
            content[min(at, len(content) - 1)] = rng.randrange(256)
        elif kind == 1:
            content[at:at] = rng.choice((b"\x00", b"\xff", b"{", b"[", b"*a", b"&a ", b": ", b"- "))
        elif kind == 2:
            del content[at : at + rng.randrange(20)]
        elif kind == 3:
            content[at:at] = content[at : at + rng.randrange(40)]
        elif kind == 4:
            content[at:at] = rng.choice((b"9", b"-", b"1e", b".")) * rng.choice((1, 400, 5000))
        elif kind == 5 and rng.random() < 0.2:
            content[at:at] = rng.choice((b"[", b'{"a":', b"- ", b"? ")) * rng.choice((70, 900))
        else:
            content[at:at] = rng.choice(
                (b"\n", b"\t", b"\r\n", b"#", b'"', b"'", b"!!python/object")
            )
    return bytes(content)
