"""Recognition of argument parsers and launchers in the text of a training script."""

from __future__ import annotations

import re

_HF_PARSER = re.compile(r"\b(?:HfArgumentParser|TrlParser)\(([^)]*)")
# Classes of transformers and TRL (`SFTConfig`), or subclasses named like them.
_HF_ARGUMENTS = re.compile(r"\b(?!Model|Data)\w*(?:TrainingArguments|Config)\b")
_SPAWNS = re.compile(
    r"\b(?:mp|multiprocessing)\.spawn\(|^\s*spawn\(|\bstart_processes\(|\b(?:notebook|debug)_launcher\(",
    re.MULTILINE,
)
_READS_ITS_RANK = re.compile(
    r"""(?:environ\.get|getenv)\(\s*["'](?:LOCAL_)?RANK|["'](?:LOCAL_)?RANK["']\s+in\s"""
    r"""|environ\[["'](?:LOCAL_)?RANK["']\](?!\s*=[^=])"""
)
_STARTS_PROGRAMS = re.compile(r"\b(?:subprocess\.\w+|Popen|os\.system|exec[lv]p?e?)\(")
_CALL = 200  # characters after the beginning of a call in which to look for a launcher's name
_NAMES_LAUNCHER = re.compile(
    r"""["'](?:torchrun|torch\.distributed\.(?:run|launch))\b"""
    r"""|["'](?:deepspeed|accelerate)(?:["'],\s*|\s)(?:["']?(?:launch\b|-|[\w/]+\.py)|\*|sys\.|__file__)"""
)
_TRAINS = re.compile(r"\bdeepspeed\.initialize\(|Trainer\(|\bAccelerator\(|\.backward\(")
_LISTS_LAUNCHER = re.compile(rf"\[\s*(?:{_NAMES_LAUNCHER.pattern})")


def parses_hf_arguments(source: str) -> bool:
    """Return whether a script parses its arguments into TrainingArguments or a subclass."""
    return any(_HF_ARGUMENTS.search(parser[1]) for parser in _HF_PARSER.finditer(source))


def starts_ranks(source: str, name: str) -> bool:
    """Return whether a script starts its ranks itself, with a launcher or by spawning them.

    A script that spawns ranks but also reads its rank from the environment does not count, because
    a launcher may start it. If the script itself trains, a launcher counts only if it starts this
    script (`name`), and not an evaluation, say.
    """
    calls = [source[call.end() : call.end() + _CALL] for call in _STARTS_PROGRAMS.finditer(source)]
    launches = [each for call in calls if _NAMES_LAUNCHER.search(each := call.split(")\n")[0])]
    if calls:
        lists = [source[found.start() :] for found in _LISTS_LAUNCHER.finditer(source)]
        launches += [each[:_CALL].split("]\n")[0] for each in lists]
    trains, itself = _TRAINS.search(source), rf"__file__|\bsys\.argv|\b{re.escape(name)}\b"
    if any(not trains or re.search(itself, launch) for launch in launches):
        return True
    return bool(_SPAWNS.search(source)) and not _READS_ITS_RANK.search(source)
