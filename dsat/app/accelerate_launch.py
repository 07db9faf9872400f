"""The user's own `accelerate launch`, with the best configuration in place of theirs.

Read for it: accelerate 1.15 (commands/launch.py, commands/config/config_args.py). A configuration
of accelerate that names a DeepSpeed file must not say itself what is in there.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

CONFIG_FILE = "accelerate.yaml"
_LAUNCHERS = (
    ("accelerate-launch",),
    ("accelerate", "launch"),
    ("python", "-m", "accelerate.commands.launch"),
)
_GAS = "gradient_accumulation_steps"
_REPLACED = ("config_file", "deepspeed_config_file", _GAS)
# Keys of `deepspeed_config` that the DeepSpeed file has in their place.
_IN_THE_FILE = (
    _GAS,
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_init_flag",  # by the file's stage, as in the trials
    "zero3_save_16bit_model",
    "zero_stage",
)


@dataclass(frozen=True)
class AccelerateLaunch:
    """A command of `accelerate launch`.

    Attributes:
        launcher: its words up to `launch`.
        options: of the launcher, without those that name or repeat a configuration.
        program: the script or module, and its arguments.
        own: the user's configuration of accelerate, if there is one.
    """

    launcher: tuple[str, ...]
    options: tuple[str, ...]
    program: tuple[str, ...]
    own: Path | None

    @classmethod
    def of(cls, command: Sequence[str], num_args: int, cwd: Path) -> AccelerateLaunch | None:
        """Take a command apart; None if it is another's.

        Args:
            num_args: the words at its end that are the script's own arguments.
            cwd: where it is started.
        """
        words, name = list(command), Path(command[0]).name
        begin = ("python" if name.startswith("python") else name, *words[1:])
        count = next((len(each) for each in _LAUNCHERS if begin[: len(each)] == each), None)
        if count is None:
            return None
        end = len(words) - num_args - 1
        options, named = [], None
        rest = iter(words[count:end])
        for word in rest:
            flag, equals, value = word.partition("=")
            option = flag.removeprefix("--").replace("-", "_")
            if not flag.startswith("--") or option not in _REPLACED:
                options.append(word)
                continue
            value = value if equals else next(rest, "")
            named = value if option == _REPLACED[0] else named
        own = cwd / named if named else _default_file()
        found = own if own.is_file() else None
        return cls(tuple(words[:count]), tuple(options), tuple(words[end:]), found)

    def command(self, best: Path, config: Mapping[str, Any]) -> list[str]:
        """Return the command with the best configuration.

        Args:
            best: the file that holds it; the copy of the user's own is beside it.
            config: what is in it.
        """
        words = [*self.launcher]
        if self.own is None:
            words += ["--deepspeed_config_file", str(best.resolve())]
        else:
            words += ["--config_file", str(best.resolve().parent / CONFIG_FILE)]
        if isinstance(config.get(_GAS), int):
            words += [f"--{_GAS}", str(config[_GAS])]
        return [*words, *self.options, *self.program]

    def copy(self, best: Path) -> str | None:
        """Return the user's own file with the best configuration named in it, comments kept.

        None if there is none, or none that can be read.
        """
        if self.own is None:
            return None
        files, text = YAML(), io.StringIO()
        files.preserve_quotes = True
        files.allow_duplicate_keys = True  # as PyYAML, with which accelerate reads it
        try:
            data = files.load(self.own.read_text(encoding="utf-8"))
        except (OSError, UnicodeError, YAMLError):
            return None
        section = data.setdefault("deepspeed_config", {}) or {}
        for key in _IN_THE_FILE:
            section.pop(key, None)
        section["deepspeed_config_file"] = str(best.resolve())
        data["deepspeed_config"] = section
        data.pop("mixed_precision", None)
        files.dump(data, text)
        return text.getvalue()


def _default_file() -> Path:
    """Return the file that `accelerate config` writes."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"
