"""Reference of the Python API, made from signatures, docstrings and options."""

from __future__ import annotations

import inspect
import operator
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dsat
import dsat.engines
import dsat.search
from dsat import api_options
from dsat.estimating.options import EstimateSettings
from dsat.options import Option, options_of
from dsat.projecting.options import ProjectSettings
from dsat.tuning.make_settings import all_options

# By function: its options, and the class that holds their types.
_OPTIONS: Mapping[str, tuple[Callable[[], Iterable[Option]], type]] = {
    "tune": (all_options, api_options.TuneOptions),
    "estimate": (lambda: options_of(EstimateSettings), api_options.EstimateOptions),
    "project": (lambda: options_of(ProjectSettings), api_options.ProjectOptions),
}
_PARTS: Mapping[str, tuple[str, ...]] = {
    "Tune and predict": ("tune", "estimate", "project", "load_run"),
    "Results": ("Result", "Estimate", "Projection"),
    "Extend": ("register_search", "register_engine"),
    "In a training script": (
        "get_ds_config_from_hparams",
        "get_hf_args_with_overwrites",
        "get_batch_config_from_mbs_gas_and_slots",
        "dsat_reporting_context",
    ),
    "Errors": ("DsatError", "UserInputError"),
    "Own searches and engines": (
        "search.Search",
        "search.Problem",
        "search.Observation",
        "search.Point",
        "search.Proposal",
        "search.Wait",
        "search.Stop",
        "engines.Engine",
        "engines.Trial",
        "engines.Outcome",
        "engines.Metrics",
        "engines.ModelProfile",
    ),
}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Options):\n", re.M)
_ITEM = re.compile(r"^(\w+(?:, \w+)*): ")


def python_reference() -> str:
    """Return the reference of all public names of `dsat`."""
    listed = {name for names in _PARTS.values() for name in names if "." not in name}
    assert listed == {name for name in dsat.__all__ if name != "__version__"}
    parts = []
    for title, names in _PARTS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name) for name in names]
    return "\n".join(parts)


def _entry(name: str) -> str:
    member = operator.attrgetter(name)(dsat)
    text, *sections = _SECTION.split(inspect.getdoc(member) or "")
    lines = [f"### `{name}`\n"]
    if not inspect.isclass(member):
        lines.append(f"```\n{name}{_signature(member)}\n```\n")
    lines.append(f"{_flowing(text)}\n")
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title != "Options":
            lines.append(_section(title, body, has_options=name in _OPTIONS))
    if inspect.isclass(member):
        lines += [_members("Properties", member), _members("Methods", member)]
    if name in _OPTIONS:
        lines.append(_options(name))
    return "\n".join(line for line in lines if line)


def _signature(function: Any) -> str:
    """Return the parameters without their types, and without options, which have a table."""
    plain = inspect.signature(inspect.unwrap(function), follow_wrapped=False)
    words = []
    for parameter in plain.parameters.values():
        if function.__name__ in _OPTIONS and parameter.name in _keywords(function.__name__):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(str(parameter.replace(annotation=parameter.empty)))
    if function.__name__ in _OPTIONS:
        words.append("**options")
    return f"({', '.join(words)})"


def _section(title: str, body: str, *, has_options: bool = False) -> str:
    """Return a section of a docstring as a list with one row per item."""
    items: list[str] = []
    for line in inspect.cleandoc(body).splitlines():
        item = _ITEM.match(line)
        if item is not None or not items:
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    items = [_ITEM.sub(r"`\1`: ", item) for item in items if item]
    if has_options:
        items = [item for item in items if not item.startswith("`options`")]
    if not items:
        return ""
    return f"**{title}**\n\n" + "\n".join(f"- {item}" for item in items) + "\n"


def _members(title: str, member: type) -> str:
    """Return the public properties or methods with the first paragraphs of their docstrings."""
    lines = []
    for name, value in vars(member).items():
        is_property = isinstance(value, property)
        text = inspect.getdoc(value) if is_property or inspect.isfunction(value) else None
        if not text or name.startswith("_") or is_property is not (title == "Properties"):
            continue
        called = name
        if not is_property:
            called += f"({', '.join(list(inspect.signature(value).parameters)[1:])})"
        lines.append(f"- `{called}`: {_flowing(text.partition(chr(10) * 2)[0])}")
    return f"**{title}**\n\n" + "\n".join(lines) + "\n" if lines else ""


def _keywords(name: str) -> dict[str, Option]:
    return {each.keyword: each for each in _OPTIONS[name][0]() if not each.shell_only}


def _options(name: str) -> str:
    """Return the table of a function's options."""
    types = typing.get_type_hints(_OPTIONS[name][1])
    rows = ["**Options**\n", "| keyword | type | default | |", "|---|---|---|---|"]
    for keyword, option in _keywords(name).items():
        kind = _type_name(types[keyword]).replace("|", "\\|")
        default = f"`{option.default}`" if option.has_plain_default else ""
        text = option.help.replace("%%", "%").replace("|", "\\|")
        text = re.sub(r": [\w.:, ]*bucket_size, .*", "", text)  # cuts the list of settings
        rows.append(f"| `{keyword}` | `{kind}` | {default} | {text} |")
    return "\n".join(rows) + "\n"


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return re.sub(r"\b(?:[a-z_]+\.)+", "", str(annotation))


def _flowing(text: str) -> str:
    """Return the text with one line per paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))
