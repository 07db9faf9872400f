"""What the installed DeepSpeed accepts, as it said itself, and what of a configuration it does not.

The schema comes from `dsat.in_trial.deepspeed_schema`, which may import DeepSpeed; nothing here
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs.ds_config import AUTO, did_you_mean

# Sections that dsat reads by itself.
_OURS = frozenset({"autotuning"})
# What DeepSpeed ignores without a word is taken for a slip of the pen from this likeness on.
_SLIP = 0.85
# Words and numbers that pydantic takes for true and false (pydantic 2, "conversion table").
_BOOLEAN_WORDS = frozenset("0 off f false n no 1 on t true y yes".split())
_CALLED = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "a mapping",
    "string": "text",
}


@dataclass(frozen=True)
class _Problem:
    path: tuple[str, ...]
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Schema:
    """What one version of DeepSpeed accepts.

    Attributes:
        version: of DeepSpeed.
        content: JSON Schema of a whole configuration, with the additions of
            `dsat.in_trial.deepspeed_schema`.
    """

    version: str
    content: Mapping[str, Any]

    def check(self, config: Mapping[str, Any], *, where: str, within: str = "") -> None:
        """Refuses what DeepSpeed refuses, and slips of the pen that it ignores.

        Args:
            config: a configuration, or a part of one, without lists of values to try.
            where: the file to name in errors.
            within: the keys that lead to the configuration in that file, with dots between them.

        Raises:
            UserInputError: a key, a type or a value is wrong.
        """
        known = {key: value for key, value in config.items() if key not in _OURS}
        problem = _problem(self.content, known, self.version)
        if problem is not None:
            place = ".".join([*filter(None, [within]), *problem.path])
            raise UserInputError(
                problem.message, where=f"{where}: {place}", hint=problem.hint.strip()
            )

    def ignored(self, config: Mapping[str, Any]) -> list[str]:
        """Keys of the top level that DeepSpeed does not know, and passes over in silence."""
        return [key for key in config if key not in self.content["properties"]]

    def default(self, path: str) -> Any:
        """What DeepSpeed takes for a setting that is not given.

        Args:
            path: the keys that lead to it, with dots between them.

        Raises:
            KeyError: this DeepSpeed has no such setting.
        """
        found: Any = self.content
        for key in path.split("."):
            found = _object_of(found)["properties"][key]
        if "removed" in found:
            raise KeyError(path)
        return found.get("default")


def _object_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping among what a setting may be."""
    for branch in _branches(schema):
        if "properties" in branch:
            return branch
    return {"properties": {}}


def _branches(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All alternatives of a schema."""
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    if not inner:
        yield schema
    for branch in inner:
        yield from _branches(branch)


def _problem(schema: Mapping[str, Any], value: Any, version: str) -> _Problem | None:
    """What is wrong with a value, if anything; DeepSpeed's models leave out what is "auto"."""
    if "removed" in schema:
        return _Problem((), f"DeepSpeed {version} refuses it: {_first_sentence(schema['removed'])}")
    if value == AUTO:
        return None
    found = [_of_branch(branch, value, version) for branch in _branches(schema)]
    if not found or None in found:
        return None
    # The branch that came furthest into the value knows best what is wrong with it.
    told = [problem for problem in found if problem is not None and problem.message]
    if told:
        return max(told, key=lambda problem: len(problem.path))
    return _Problem((), *_expected(list(_branches(schema)), value))


def _of_branch(schema: Mapping[str, Any], value: Any, version: str) -> _Problem | None:
    """What is wrong by one alternative; without a message if it is the value as a whole."""
    if "names" in schema and isinstance(value, str):
        return _unknown_name(schema, value, version)
    allowed = _allowed(schema)
    if allowed:
        return None if value in allowed else _Problem((), "")
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else list(types)
    if not types and "properties" in schema:
        types = ["object"]
    if types and not any(_is(kind, value, plain=schema.get("plain", False)) for kind in types):
        return _Problem((), "")
    if not _is_within(schema, value):
        return _Problem((), "")
    if "properties" in schema and isinstance(value, Mapping):
        return _of_mapping(schema, value, version)
    if "items" in schema and isinstance(value, (list, tuple)):
        for position, part in enumerate(value):
            problem = _problem(schema["items"], part, version)
            if problem is not None:
                return _Problem((str(position), *problem.path), problem.message, problem.hint)
    return None


def _of_mapping(
    schema: Mapping[str, Any], value: Mapping[str, Any], version: str
) -> _Problem | None:
    properties: Mapping[str, Any] = schema["properties"]
    strict = schema.get("additionalProperties") is False
    for key, part in value.items():
        if key not in properties:
            if strict and part == AUTO:  # as all that is, wherever a model is read
                continue
            near = did_you_mean(key, properties, **({} if strict else {"likeness": _SLIP}))
            if strict or (near and not schema.get("open")):
                verb = "has" if strict else "reads"
                return _Problem((key,), f"DeepSpeed {version} {verb} no setting {key!r}", near)
            continue
        if part is None and not strict:  # as if it were not there, wherever that is possible
            continue
        problem = _problem(properties[key], part, version)
        if problem is not None:
            return _Problem((key, *problem.path), problem.message, problem.hint)
    return None


def _is(kind: str, value: Any, *, plain: bool) -> bool:
    """Whether a value is of a type of JSON, or of what pydantic converts to it."""
    if kind == "null":
        return value is None
    if kind == "object":
        return isinstance(value, Mapping)
    if kind == "array":
        return isinstance(value, (list, tuple))
    if kind == "string":
        return isinstance(value, str)
    if kind == "boolean":
        if plain:
            return isinstance(value, (bool, int)) and value in (0, 1)
        return isinstance(value, bool) or str(value).lower().removesuffix(".0") in _BOOLEAN_WORDS
    if plain and isinstance(value, str):
        return False
    number = _converted(value)
    return number is not None and (kind == "number" or number.is_integer())


def _converted(value: Any) -> float | None:
    """A number, or text that is one."""
    if isinstance(value, (int, float, str)):
        try:
            return float(value)
        except ValueError:
            pass
    return None


def _is_within(schema: Mapping[str, Any], value: Any) -> bool:
    number = _converted(value)
    if number is None or schema.get("type") not in ("integer", "number"):
        return True
    least, most = schema.get("minimum", number), schema.get("maximum", number)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    return (
        least <= number <= most
        and (above is None or number > above)
        and (below is None or number < below)
    )


def _expected(branches: Sequence[Mapping[str, Any]], value: Any) -> tuple[str, str]:
    """What a value should have been: a sentence, and the nearest word, if there is one."""
    words: list[Any] = []
    said: list[str] = []
    for branch in branches:
        allowed = _allowed(branch)
        words += allowed
        types = branch.get("type", "object" if "properties" in branch else [])
        for kind in [types] if isinstance(types, str) else types:
            if kind != "null" and not allowed:
                said.append(_CALLED[kind] + _bounds(branch))
    if words:
        said.insert(0, f"one of {', '.join(map(str, words))}")
    message = f"must be {' or '.join(dict.fromkeys(said))}, not {value!r}"
    return message, did_you_mean(value, map(str, words))


def _allowed(schema: Mapping[str, Any]) -> list[Any]:
    """The values that there are, if they are listed."""
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _bounds(branch: Mapping[str, Any]) -> str:
    said = [
        f"{word} {branch[key]:g}"
        for key, word in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "of at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in branch
    ]
    return " " + " and ".join(said) if said else ""


def _unknown_name(schema: Mapping[str, Any], value: str, version: str) -> _Problem | None:
    any_case = schema.get("any_case", ())
    if value in schema["names"] or value.lower() in any_case:
        return None
    near = did_you_mean(value, [*schema["names"], *any_case])
    return _Problem((), f"DeepSpeed {version} knows no {value!r}", near)


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".") + "."
