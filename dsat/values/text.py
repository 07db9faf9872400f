"""Sanitizing of untrusted text for terminals, journals and pages: escape, shorten, hide secrets.

Scripts, files and exceptions may contain lone surrogates, which UTF-8 cannot encode, terminal
escape sequences, megabytes of text, and passwords.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"
MOST_OF_A_LINE = 2_000
MOST_OF_A_LOG = 20_000
# Control characters (C0 and C1) except tabs and newlines, surrogates, and controls of the text
# direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")

# Names of secrets: from detect-secrets 1.5 (plugins/keyword.py), and of trackers, clouds and
# databases. `key` alone does not count, since scripts have `--text_key` and `--sort_key`.
_OF_WHAT = "access account api auth aws azure client comet db database encryption fernet gcp github"
_OF_WHAT += (
    " google hf huggingface license master openai private s3 sas secret service signing ssh storage"
)
_OF_WHAT += " anthropic clearml mistral neptune swanlab wandb"
_KEY = rf"(?:{'|'.join(_OF_WHAT.split())})_?keys?"
_ACCOUNTS = "admin|db|database|default|ftp|key|mail|mysql|pg|proxy|redis|root|smtp|ssh|user"
_ABBREVIATED = rf"^pass|(?:{_ACCOUNTS})_?pass"
_WORD = rf"(?:(?:^|_)(?:token|pwd?|pat|auth|cookies?|dsn|credentials?|creds|{_KEY})|{_ABBREVIATED}"
_WORD += r"|(?:^|_)(?:bearer|jwt|amz_signature)|authtokens?|passcode"
_WORD += r"|passwords?|passwd|passphrase|secrets?|apikeys?|connection_string)"
_NAME_OF_SECRET = re.compile(rf"{_WORD}(?:_?(?:id|value|key|base64|b64|json))?$")
# Names for tokens of a vocabulary, not of an account.
_HARMLESS = re.compile(
    r"(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|max|min|num|new|next|special|stop|image|per|start|end"
    r"|prefix|initializer|instance|placeholder|class|modifier|trigger)_token$"
    r"|_token_id$"
)
_BEGINNINGS = (
    r"hf_(?=[A-Z0-9]*[a-z])(?=[a-z0-9]*[A-Z])(?=[A-Za-z0-9]{30})|sk-(?:proj|ant|or-v1|svcacct|lf)-|"
    r"sk-(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])(?=[A-Za-z]*[0-9])(?=[A-Za-z0-9]{20})|"
    r"sk-(?=[0-9a-f]{32})|gh[opsur][_-]|github_pat_|gl[a-z]{2,5}-(?=[\w-]{20})|AKIA|ASIA|AIza|ya29\.|xox[abeprs]-|npm_|pypi-|SG\.|"
    r"r8_(?=[A-Za-z0-9]{37}\b)|(?:dop|doo|dor)_v1_|[rs]k_(?:live|test)_|hv[bs]\.|gsk_|nvapi-|dapi(?=[0-9a-f]{30})|"
    r"ATATT3|figd_|ntn_|AGE-SECRET-KEY-|key-(?=[0-9a-f]{32})|bot(?=\d{8,}:)|"
    r"lin_api_|xai-|pplx-|shp(?:at|ca|pa|ss)_|glsa_|tskey-|dckr_pat_|lsv2_|pcsk_|whsec_|wandb_v\d_"
)
# Texts that look like secrets without a name; the group before the secret is kept.
_SHOWN_SECRETS = [
    re.compile(pattern)
    for pattern in (
        # URLs with credentials.
        r"(?<=://)[^\s/@:'\"]*:[^\s/'\"]+(?=@)",  # up to the last @
        r"(?<=://)[\w.~+=-]{16,}(?=@)",
        r"(?i)([?&](?:sig|signature|token|access_token|key|code|x-amz-\w+)=)[^&\s'\"]+",
        r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?basic\s+)[\w+/=-]+",
        r"(?i)(\bauthorization[\"']?[:=]\s*[\"']?)(?=\w*\d)[\w+/=-]{12,}",
        r"(?i)(\bbearer\s+)[\w.~+/=-]{8,}",
        r"(?i)(\b(?:set-)?cookie:\s*)[^\r\n]+",
        # Webhooks, whose path is the secret.
        r"(hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/\d+/)[\w/-]+",
        # `invalid token hf4...`: a word that looks like a key, after a name for keys.
        r"(?i)\b((?:token|password|passphrase|secret|api[ _-]?key):?\s+"
        r"(?:(?:is|was|provided|not valid):?\s+)?['\"]?)"
        r"(?=[^\s\d]*\d)(?=[^\sa-z]*[a-z])[\w.~+/-]{12,}",
        # Keys with a known prefix, as listed by GitHub's secret scanning.
        rf"\b(?:{_BEGINNINGS})[A-Za-z0-9_.:-]{{12,}}",
        r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+",
        r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|$)",
    )
]
# `name=value`, `"name": "value"`, also escaped, `--name value`, `'--name', 'value'`.
_NAMED = re.compile(
    r"""(?<![\w.-])(?<!\$\{)(?:([\w.-]{1,100})\\?["']?\s{0,4}[=:]|"""
    r"""(--?[\w.-]{1,100})(?:["'],)?(?=\s))\s{0,4}\\?"""
)
# `api_key: DeepSpeed has no such setting`: a sentence about a setting, not its value.
_SENTENCE = re.compile(r": [A-Za-z]+ [A-Za-z0-9]")
# Quoted or unquoted parts, which a shell concatenates.
_QUOTED = """"[^"]*"|'[^']*'"""
_VALUE = re.compile(rf"""(?:{_QUOTED}|-?[^\s,;&)}}\]"'$-])(?:{_QUOTED}|[^\s,;&)}}\]"'])*""")
# Booleans, small numbers and vocabulary tokens such as `<eos>`: never secrets.
_NO_SECRET = re.compile(r"(?i)true|false|none|null|-?[0-9.]{1,3}|<[^<>]*>|\[[A-Z]+\]")
_PATH = re.compile(r"~?/|\.\.?(?:/|$)")  # its beginning; `--pwd` may be a folder
_SOME_KEY = "a1" * 10
_FLAG = re.compile(r"-{0,2}[A-Za-z][\w.-]*")
_OF_THE_SHELL = frozenset("HOME PATH PWD OLDPWD USER UID SHELL LANG TERM HOSTNAME".split())
_DASHED_KEY = re.compile(r"--(?=[^0-9]*[0-9])(?=[^A-Z]*[A-Z])[a-zA-Z0-9]{12,}$")
_LONGEST_KEY = 10_000  # characters, of an RSA key of 8,192 bits and more
_LEAST_KNOWN = 8  # characters of a secret that is hidden wherever it occurs
_LOOKS_LIKE_A_KEY = re.compile(r"(?=[^0-9]*[0-9])(?=[^a-zA-Z]*[a-zA-Z])_?[a-zA-Z0-9+/=-]{12,}$")


def printable(text: str, limit: int = MOST_OF_A_LINE) -> str:
    """Return a text that is safe to print and store, with secrets hidden.

    Args:
        limit: maximum number of characters; a longer text keeps its beginning and its end.
    """
    if len(text) <= limit:
        text = hide_secrets(escape(text))
        if len(text) <= limit:
            return text
    left_out = len(text) - limit
    note = f" ... ({left_out:,} characters left out) ... "
    half = (limit - len(note)) // 2
    # Hide secrets first, so that none is cut in half and missed.
    window = limit + _LONGEST_KEY
    first, last = (hide_secrets(escape(part)) for part in (text[:window], text[-window:]))
    return f"{first[:half]}{note}{last[-half:]}"


@functools.lru_cache(maxsize=1024)  # views show the same settings in many places
def is_secret(name: str, value: str = "") -> bool:
    """Return whether the name of a flag, variable or key denotes a secret.

    Args:
        name: the name; may be dotted, or `ENV:` followed by the name of a variable.
        value: the named value. If it looks like a key, a name that ends in `_key`, `_pass` or
            `tokens` denotes a secret too. `true`, small numbers and the like are never secrets.
    """
    if _NO_SECRET.fullmatch(value) or (name.lower() in ("pwd", "--pwd") and _PATH.match(value)):
        return False
    last, pair = ("_".join(re.split("[.:]", name)[-count:]) for count in (1, 2))
    return _denotes_secret(last, value) or (last.lower() == "key" and _denotes_secret(pair, value))


def _denotes_secret(name: str, value: str) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").strip("_")
    if words.endswith(("_key", "_pass", "tokens")) and _LOOKS_LIKE_A_KEY.match(value):
        return True
    return bool(_NAME_OF_SECRET.search(words)) and not _HARMLESS.search(words)


@functools.lru_cache(maxsize=8)
def _known_secrets(command: tuple[str, ...], variables: int) -> tuple[str, ...]:
    """Return the secrets in a command and in the environment, the longest first.

    Paths and words that may be ordinary are left out. `variables` is the number of environment
    variables: a new number makes a new entry in the cache.
    """
    secrets = set()
    for words in (command, " ".join(command).split()):  # also inside of `bash -c '...'`
        for word, (visible, name) in zip(words, _split(words), strict=True):
            secrets |= {word.removeprefix(visible)} if name else set()
    secrets |= {value for name, value in os.environ.items() if is_secret(name, value)}
    hidden = {
        value
        for value in secrets
        if len(value) >= _LEAST_KNOWN and not value.isalpha() and not _PATH.match(value)
    }
    return tuple(sorted(hidden, key=len, reverse=True))


def hide_secrets(text: str) -> str:
    """Return a text with `***` in place of anything that looks like a secret.

    The secrets of this process's command and environment are hidden wherever they occur.
    """
    return _hide_secrets(text, _known_secrets(tuple(sys.argv), len(os.environ)))


@functools.lru_cache(maxsize=1024)
def _hide_secrets(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern in _SHOWN_SECRETS:
        text = pattern.sub((r"\1" if pattern.groups else "") + HIDDEN, text)
    parts, position = [], 0
    for match in _NAMED.finditer(text):
        name = match[1] or match[2]
        if match.start() < position or not is_secret(name, _SOME_KEY):
            continue
        value = _VALUE.match(text, match.end())
        if value is None or value[0][1:2] == "$":
            continue
        if not is_secret(name, value[0].strip("\"'")):
            continue
        if _SENTENCE.match(text, match.start() + len(name)):
            continue
        quote, end = value[0][0] if value[0][0] in "\"'" else "", value.end()
        around = text[match.start() - 1 : match.start()]
        if not quote and around and around in "\"'" and match[0].count(around) == 0:
            end = max(end, text.find(around, match.end()))  # 'name=a b c'
        parts += [text[position : match.end()], quote, HIDDEN, quote]
        position = end
    return "".join([*parts, text[position:]])


def hide_secrets_in_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command with `***` in place of anything that looks like a secret."""
    return [f"{rest}{HIDDEN}" if name else hide_secrets(rest) for rest, name in _split(words)]


def shell_line(words: Sequence[str], folder: Path) -> str:
    """Return a shell command in which variables stand for the secrets.

    The shell reports an error if such a variable is not set.

    Args:
        folder: a folder of dsat; its path is shown even if it looks like a secret.
    """
    line: list[str] = []
    flag = ""
    for number, (word, (visible, name)) in enumerate(zip(words, _split(words), strict=True)):
        if not name and _has_secret(word.replace(str(folder.resolve()), "")):
            key, equals, _ = word.partition("=")
            is_named = equals and _FLAG.fullmatch(key) and not _has_secret(key)
            visible = f"{key}=" if is_named else ""
            name = key if is_named else flag or f"argument_{number}"
        quoted = shell_word(visible) if visible or not name else ""
        line.append(quoted + (_required_variable(name) if name else ""))
        flag = word if word.startswith("-") and visible == word and _FLAG.fullmatch(word) else ""
    return " ".join(line)


def shell_word(text: str) -> str:
    """Quote a word for a shell, in bash's `$'...'` if a terminal could not show it."""
    if not _UNPRINTABLE.search(text):
        return shlex.quote(text)
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_UNPRINTABLE.sub(_escape_bytes, text)}'"


def redacted_command(words: Iterable[str]) -> str:
    """Return a command for a shell, with `***` in place of its secrets."""
    return " ".join(map(shell_word, hide_secrets_in_words(words)))


def _escape_bytes(match: re.Match[str]) -> str:
    """Return the escapes of a character's bytes; a surrogate stands for a byte of a file name."""
    return "".join(f"\\x{byte:02x}" for byte in match[0].encode("utf-8", "surrogateescape"))


def assignment(name: str, value: str, origin: str = "your command") -> str:
    """Return `NAME=value` for a shell, with `"${NAME:?as in ORIGIN}"` for a secret value."""
    text = f"{name}={value}"
    is_open = hide_secrets(text) == text and not (value and is_secret(name, value))
    return f"{name}={shell_word(value) if is_open else _required_variable(name, origin)}"


def _required_variable(name: str, origin: str = "your command") -> str:
    variable = re.sub(r"[^A-Za-z0-9]", "_", name.lstrip("-")).upper()
    if variable in _OF_THE_SHELL or variable[:1].isdigit():
        variable = f"ARGUMENT_{variable}"
    return f'"${{{variable}:?as in {origin}}}"'


def _has_secret(text: str) -> bool:
    return hide_secrets(text) != text


def _split(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each word without its secret, and the name that denotes the secret (or "")."""
    flag, count = "", 0
    for word in words:
        is_flag = word.startswith("--") and not _DASHED_KEY.match(word)
        is_further = count == 0 or (flag.endswith("s") and _LOOKS_LIKE_A_KEY.match(word))
        if is_secret(flag, word) and not is_flag and is_further:
            count += 1
            yield "", flag if count == 1 else f"{flag}_{count}"
            continue
        name, equals, value = word.partition("=")
        if equals and is_secret(name, value):
            yield f"{name}=", name
        else:
            yield word, ""
        flag, count = word if word.startswith("-") and not equals else "", 0


def hide_secrets_in_values(value: Any, names: tuple[str, ...] = ()) -> Any:
    """Return a JSON value with `***` in place of anything that looks like a secret.

    Args:
        names: the keys on the path to the value; any of them may denote a secret.
    """
    if isinstance(value, Mapping):
        label = value.get("name")  # `{"name": "HF_TOKEN", "value": "hf_..."}`
        scope = (*names, label) if isinstance(label, str) and "value" in value else names
        return {
            key: hide_secrets_in_values(inner, (*(scope if key == "value" else names), str(key)))
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        is_command = all(isinstance(inner, str) for inner in value)
        if is_command and not any(is_secret(name, _SOME_KEY) for name in names):
            return hide_secrets_in_words(value)
        return [hide_secrets_in_values(inner, names) for inner in value]
    is_text_or_number = isinstance(value, (str, int)) and not isinstance(value, bool)
    denoting = (*names, ".".join(names[-2:]))
    if value and is_text_or_number and any(is_secret(name, str(value)) for name in denoting):
        return HIDDEN
    return hide_secrets(value) if isinstance(value, str) else value


def escape(text: str) -> str:
    """Return a text with its control characters escaped, so that terminals do not obey them."""
    return _UNPRINTABLE.sub(
        lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text
    )
