"""Text from outside, made fit for a terminal, a journal and a page: escaped, cut, without secrets.

What scripts, files and exceptions say may hold anything: lone surrogates that no UTF-8 file can
take, escape sequences of terminals, megabytes, passwords.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
MOST_OF_A_LINE = 2_000
MOST_OF_A_LOG = 20_000
# Control characters but for tabs and newlines (of C0 and C1), surrogates, and what turns the
# direction of text.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")

# Names of secrets of detect-secrets 1.5 (plugins/keyword.py), and those of trackers, clouds and
# databases. A bare `key` is none: scripts have `--text_key` and `--sort_key`.
_OF_WHAT = "access account api auth aws azure client comet db database encryption gcp github google"
_OF_WHAT += (
    " hf huggingface license master openai private s3 sas secret service signing ssh storage"
)
_OF_WHAT += " anthropic clearml mistral neptune swanlab wandb"
_KEY = rf"(?:{'|'.join(_OF_WHAT.split())})_?key"
_ABBREVIATED = r"^pass|(?:db|database|ftp|key|mail|mysql|pg|proxy|redis|smtp|user)_?pass"
_WORD = rf"(?:(?:^|_)(?:token|pwd|pat|auth|credentials?|{_KEY})|{_ABBREVIATED}|password|passwd"
_WORD += r"|passphrase|secret|apikey)"
_NAME_OF_SECRET = re.compile(rf"{_WORD}(?:_?(?:id|value|key))?$")
# Tokens of a text, not of an account.
_HARMLESS = re.compile(
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|max|min|num|new|next|special|stop|image|per)_token$"
    r"|_token_id$"
)
_SHOWN_SECRETS = (
    # URLs with credentials.
    (re.compile(r"(?<=://)[^\s/@:'\"]*:[^\s/@'\"]+(?=@)"), HIDDEN),
    (re.compile(r"(?<=://)[\w.~+=-]{16,}(?=@)"), HIDDEN),
    (
        re.compile(r"(?i)([?&](?:sig|signature|token|access_token|x-amz-\w+)=)[^&\s'\"]+"),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?basic\s+)[\w+/=-]+"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    # Keys of Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google, and JSON web tokens.
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"\b(?:gh[opsur]|github_pat|glpat)[_-][A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), HIDDEN),
    (re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"), HIDDEN),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{30,}"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"), HIDDEN),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|$)", re.S),
        HIDDEN,
    ),
)
# `name=value`, `"name": "value"`, `--name value`.
_NAMED = re.compile(
    r"""(?<![\w.-])(?:([\w.-]{1,100})["']?\s{0,4}[=:]|(--?[\w.-]{1,100})(?=\s))\s{0,4}"""
)
# `api_key: DeepSpeed has no such setting`: a sentence about a setting, and no value of it.
_SENTENCE = re.compile(r": [A-Za-z]+ [A-Za-z0-9]")
_VALUE = re.compile(r"""("[^"]*"|'[^']*'|[^\s,;&)}\]"'$-][^\s,;&)}\]]*)""")


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


def is_secret(name: str) -> bool:
    """Check if a name (of a flag, a variable, a key) is that of a secret."""
    last = name.rpartition(".")[2]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower().replace("-", "_").strip("_")
    return bool(_NAME_OF_SECRET.search(words)) and not _HARMLESS.search(words)


def without_secrets(text: str) -> str:
    """A text with `***` in place of what looks like a secret."""
    for pattern, instead in _SHOWN_SECRETS:
        text = pattern.sub(instead, text)
    parts, position = [], 0
    for named in _NAMED.finditer(text):
        if named.start() < position or not is_secret(named[1] or named[2]):
            continue
        value = _VALUE.match(text, named.end())
        if value is None or value[0][1:2] == "$":
            continue
        if _SENTENCE.match(text, named.start() + len(named[1] or named[2])):
            continue
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts += [text[position : named.end()], quote, HIDDEN, quote]
        position = value.end()
    return "".join([*parts, text[position:]])


def words_without_secrets(words: Iterable[str]) -> list[str]:
    """The words of a command, `***` in place of what looks like a secret."""
    shown: list[str] = []
    flag = ""
    for word in words:
        if flag and not word.startswith("--"):
            shown.append(HIDDEN)
            flag = ""
            continue
        name, equals, _ = word.partition("=")
        if equals and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(without_secrets(word))
        flag = word if word.startswith("-") and not equals and is_secret(word) else ""
    return shown


def values_without_secrets(value: Any) -> Any:
    """A value as JSON has it, `***` in place of what looks like a secret."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if is_secret(str(key)) and isinstance(inner, str) and inner
            else values_without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(inner, str) for inner in value):
            return words_without_secrets(value)
        return [values_without_secrets(inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) else value


def _escape(text: str) -> str:
    return _UNPRINTABLE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()
