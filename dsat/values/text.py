"""Text from outside, made fit for a terminal, a journal and a page: escaped, cut, without secrets.

What scripts, files and exceptions say may hold anything: lone surrogates that no UTF-8 file can
take, escape sequences of terminals, megabytes, passwords.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "***"
MOST_OF_A_LINE = 2_000
MOST_OF_A_LOG = 20_000
# Control characters but for tabs and newlines (of C0 and C1), surrogates, and what turns the
# direction of text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")

# Names of secrets of detect-secrets 1.5 (plugins/keyword.py), and those of trackers, clouds and
# databases. A bare `key` is none: scripts have `--text_key` and `--sort_key`.
_OF_WHAT = "access account api auth aws azure client comet db database encryption fernet gcp github"
_OF_WHAT += (
    " google hf huggingface license master openai private s3 sas secret service signing ssh storage"
)
_OF_WHAT += " anthropic clearml mistral neptune swanlab wandb"
_KEY = rf"(?:{'|'.join(_OF_WHAT.split())})_?keys?"
_ACCOUNTS = "admin|db|database|default|ftp|key|mail|mysql|pg|proxy|redis|root|smtp|ssh|user"
_ABBREVIATED = rf"^pass|(?:{_ACCOUNTS})_?pass"
_WORD = rf"(?:(?:^|_)(?:token|pwd|pat|auth|cookies?|dsn|credentials?|{_KEY})|{_ABBREVIATED}"
_WORD += r"|passwords?|passwd|passphrase|secrets?|apikeys?|connection_string)"
_NAME_OF_SECRET = re.compile(rf"{_WORD}(?:_?(?:id|value|key|base64|b64|json))?$")
# Tokens of a text, not of an account.
_HARMLESS = re.compile(
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|max|min|num|new|next|special|stop|image|per|start|end"
    r"|prefix)_token$"
    r"|_token_id$"
)
_BEGINNINGS = (
    r"hf_(?=[A-Za-z0-9]{16})|sk-|gh[opsur][_-]|github_pat_|glpat-|AKIA|ASIA|AIza|ya29\.|xox[abeprs]-|npm_|pypi-|SG\.|"
    r"r8_|(?:dop|doo|dor)_v1_|[rs]k_(?:live|test)_|hv[bs]\.|gsk_|nvapi-|dapi(?=[0-9a-f]{30})|"
    r"lin_api_|xai-|pplx-|shp(?:at|ca|pa|ss)_|glsa_|tskey-|dckr_pat_|lsv2_|pcsk_|whsec_"
)
_SHOWN_SECRETS = (
    # URLs with credentials.
    (re.compile(r"(?<=://)[^\s/@:'\"]*:[^\s/'\"]+(?=@)"), HIDDEN),  # up to the last @
    (re.compile(r"(?<=://)[\w.~+=-]{16,}(?=@)"), HIDDEN),
    (
        re.compile(r"(?i)([?&](?:sig|signature|token|access_token|x-amz-\w+)=)[^&\s'\"]+"),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?basic\s+)[\w+/=-]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    # Webhooks, whose path is the secret.
    (
        re.compile(r"(hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/\d+/)[\w/-]+"),
        rf"\1{HIDDEN}",
    ),
    # `invalid token hf4...`: what looks like a key behind the word for it.
    (
        re.compile(
            r"(?i)\b((?:token|password|passphrase|secret|api[ _-]?key)\s+['\"]?)"
            r"(?=[^\s\d]*\d)(?=[^\sa-z]*[a-z])[\w.~+/-]{12,}"
        ),
        rf"\1{HIDDEN}",
    ),
    # Keys that are known by how they begin, as GitHub's secret scanning has them.
    (re.compile(rf"\b(?:{_BEGINNINGS})[A-Za-z0-9_.-]{{12,}}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"), HIDDEN),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|$)", re.S),
        HIDDEN,
    ),
)
# `name=value`, `"name": "value"`, `--name value`.
_NAMED = re.compile(
    r"""(?<![\w.-])(?<!\$\{)(?:([\w.-]{1,100})["']?\s{0,4}[=:]|(--?[\w.-]{1,100})(?=\s))\s{0,4}"""
)
# `api_key: DeepSpeed has no such setting`: a sentence about a setting, and no value of it.
_SENTENCE = re.compile(r": [A-Za-z]+ [A-Za-z0-9]")
# In quotes, or not, or one after the other as a shell has them.
_QUOTED = """"[^"]*"|'[^']*'"""
_VALUE = re.compile(rf"""(?:{_QUOTED}|-?[^\s,;&)}}\]"'$-])(?:{_QUOTED}|[^\s,;&)}}\]"'])*""")
# Switches, small numbers and marks of a text are no secrets, whatever they are called.
_NO_SECRET = re.compile(r"(?i)true|false|none|null|-?[0-9.]{1,3}|<[^<>]*>|\[[A-Z]+\]")
_SOME_KEY = "a1" * 10
_DASHED_KEY = re.compile(r"--(?=[^0-9]*[0-9])(?=[^A-Z]*[A-Z])[a-zA-Z0-9]{12,}$")
_LOOKS_LIKE_A_KEY = re.compile(r"(?=[^0-9]*[0-9])(?=[^a-zA-Z]*[a-zA-Z])_?[a-zA-Z0-9+/=-]{12,}$")


def printable(text: str, most: int = MOST_OF_A_LINE) -> str:
    """A text without what spoils a terminal or a file, and without the secrets it shows.

    What is printable already is returned as it is.

    Args:
        text: from outside.
        most: characters; of a longer text the beginning and the end are kept.
    """
    if len(text) <= most:
        text = without_secrets(_escape(text))
        if len(text) <= most:
            return text
    left_out = len(text) - most
    note = f" ... ({left_out:,} characters left out) ... "
    half = (most - len(note)) // 2
    # Secrets that the cut goes through are seen whole.
    first, last = (without_secrets(_escape(part)) for part in (text[:most], text[-most:]))
    return f"{first[:half]}{note}{last[-half:]}"


def is_secret(name: str, value: str = "") -> bool:
    """Check if a name (of a flag, a variable, a key) is that of a secret.

    Args:
        name: may be dotted.
        value: what it has; a `key`, `pass` or `tokens` is a secret if its value looks like one.
    """
    last = name.rpartition(".")[2]
    if _NO_SECRET.fullmatch(value):
        return False
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower().replace("-", "_").strip("_")
    if words.endswith(("_key", "_pass", "tokens")) and _LOOKS_LIKE_A_KEY.match(value):
        return True
    return bool(_NAME_OF_SECRET.search(words)) and not _HARMLESS.search(words)


def without_secrets(text: str) -> str:
    """A text with `***` in place of what looks like a secret."""
    for pattern, instead in _SHOWN_SECRETS:
        text = pattern.sub(instead, text)
    parts, position = [], 0
    for named in _NAMED.finditer(text):
        name = named[1] or named[2]
        if named.start() < position or not is_secret(name, _SOME_KEY):
            continue
        value = _VALUE.match(text, named.end())
        if value is None or value[0][1:2] == "$":
            continue
        if not is_secret(name, value[0].strip("\"'")):
            continue
        if _SENTENCE.match(text, named.start() + len(name)):
            continue
        quote, end = value[0][0] if value[0][0] in "\"'" else "", value.end()
        around = text[named.start() - 1 : named.start()]
        if not quote and around and around in "\"'" and named[0].count(around) == 0:
            end = max(end, text.find(around, named.end()))  # 'name=a b c'
        parts += [text[position : named.end()], quote, HIDDEN, quote]
        position = end
    return "".join([*parts, text[position:]])


def words_without_secrets(words: Iterable[str]) -> list[str]:
    """The words of a command, `***` in place of what looks like a secret."""
    return [f"{shown}{HIDDEN}" if name else shown for shown, name in _hidden(words)]


def shell_line(words: Iterable[str]) -> str:
    """A line for a shell, which names the variables that its secrets are to be given in.

    The shell refuses to go on without them.
    """
    return " ".join(
        f"{shlex.quote(shown) if shown else ''}{_asked_for(name)}" if name else shlex.quote(shown)
        for shown, name in _hidden(words)
    )


def assignment(name: str, value: str, origin: str = "your command") -> str:
    """A shell's assignment of a variable, which the shell is asked for if it is a secret."""
    shown = f"{name}={value}"
    is_open = without_secrets(shown) == shown and not (value and is_secret(name, value))
    return f"{name}={shlex.quote(value) if is_open else _asked_for(name, origin)}"


def _asked_for(name: str, origin: str = "your command") -> str:
    variable = re.sub(r"\W", "_", name.lstrip("-"))
    return f'"${{{variable if variable.isupper() else variable.upper()}:?as in {origin}}}"'


def _hidden(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield what of each word may be shown, and the name of the secret that follows, if any."""
    flag = ""
    for word in words:
        is_flag = word.startswith("--") and not _DASHED_KEY.match(word)
        if is_secret(flag, word) and not is_flag:
            yield "", flag
            flag = ""
            continue
        name, equals, value = word.partition("=")
        if equals and is_secret(name, value):
            yield f"{name}=", name
        else:
            yield without_secrets(word), ""
        flag = word if word.startswith("-") and not equals else ""


def values_without_secrets(value: Any, names: tuple[str, ...] = ()) -> Any:
    """A value as JSON has it, `***` in place of what looks like a secret.

    Args:
        value: of any kind.
        names: the keys that lead to it, any of which may be that of a secret.
    """
    if isinstance(value, Mapping):
        return {
            key: values_without_secrets(inner, (*names, str(key))) for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        is_command = all(isinstance(inner, str) for inner in value)
        if is_command and not any(is_secret(name, _SOME_KEY) for name in names):
            return words_without_secrets(value)
        return [values_without_secrets(inner, names) for inner in value]
    is_text_or_number = isinstance(value, (str, int)) and not isinstance(value, bool)
    if value and is_text_or_number and any(is_secret(name, str(value)) for name in names):
        return HIDDEN
    return without_secrets(value) if isinstance(value, str) else value


def _escape(text: str) -> str:
    return _UNPRINTABLE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()
