"""Text from outside: escaped, shortened, and without secrets."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsat.values.text import HIDDEN as STARS
from dsat.values.text import (
    assignment,
    hide_secrets,
    hide_secrets_in_values,
    hide_secrets_in_words,
    is_secret,
    printable,
    redacted_command,
    shell_line,
)

KEY = "Zx9kQ2mWvT7bL4pR8s"
REAL = "aB3dEf12345678GhIjKl" * 2


def test_nothing_spoils_a_file_or_a_terminal() -> None:
    text = "a\ud800b\x1b[2Jc\x00\x9b\u202ed\te\nf\rg ö 日本"
    shown = printable(text)
    assert shown == "a\\ud800b\\x1b[2Jc\\x00\\x9b\\u202ed\te\nf\\rg ö 日本"
    assert printable(shown) == shown
    shown.encode("utf-8")


def test_long_texts_keep_both_ends() -> None:
    text = "the beginning " + "x" * 20_000_000 + " the end"
    shown = printable(text, 200)
    assert len(shown) < 300
    assert shown.startswith("the beginning ") and shown.endswith(" the end")
    assert "19,999,822 characters left out" in shown


HIDDEN = {
    "https://user:hunter2@host/x?y=1": "https://***@host/x?y=1",
    "Authorization: Bearer abcdefgh12345": "Authorization: Bearer ***",
    f"hf_{REAL[:34]} in a text": "*** in a text",
    f"sk-{REAL}, sk-proj-{REAL} and sk-ant-api03-{REAL}": "***, *** and ***",
    f"sk-{'0123456789abcdef' * 2} of r8_{REAL[:37]}": "*** of ***",
    'KeyError: {"api_key": "x y", "lr": 1}': 'KeyError: {"api_key": "***", "lr": 1}',
    "WANDB_API_KEY=0123 python": "WANDB_API_KEY=*** python",
    "train.py --hf-token abc --lr 1": "train.py --hf-token *** --lr 1",
    "password: hunter2, next": "password: ***, next",
    "-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----": "***",
    "https://abcdefghijklmnopqrst@host/x": "https://***@host/x",
    "https://host/c?sv=1&sig=a%2Fb&x=1": "https://host/c?sv=1&sig=***&x=1",
    "AccountName=acc;AccountKey=aB3dEf12345678==;EndpointSuffix=core.windows.net": (
        "AccountName=acc;AccountKey=***;EndpointSuffix=core.windows.net"
    ),
    "BlobEndpoint=https://x.net/;SharedAccessSignature=sv=1&ss=b&sig=aB%2Fc --lr 1": (
        "BlobEndpoint=https://x.net/;SharedAccessSignature=sv=1&ss=b&sig=*** --lr 1"
    ),
    "Authorization: Basic dXNlcjpwYXNz": "Authorization: Basic ***",
    "--trainer.hub_token X --lr 3": "--trainer.hub_token *** --lr 3",
    "--wandb_api_key -iq19ikt --lr 3": "--wandb_api_key *** --lr 3",
    "KAGGLE_KEY=q7t6rpvlfv4j521o92ue": "KAGGLE_KEY=***",
    "sk_live_wOP6AyhEqhaz7Kd2 npm_run": "*** npm_run",
    "'--password=my pass phrase' --lr 1": "'--password=***' --lr 1",
    "env 'MY_TOKEN=a b c' LOWER=x": "env 'MY_TOKEN=***' LOWER=x",
    "--api_key 'it'\"'\"'s-a-secret-9' --lr 1": "--api_key '***' --lr 1",
    "['train.py', '--api_key', 'hunter2', '--lr', '1']": (
        "['train.py', '--api_key', '***', '--lr', '1']"
    ),
    r"{\"api_key\": \"x y\", \"lr\": 1}": r'{\"api_key\": \"***", \"lr\": 1}',
    f"Invalid API key: {KEY}": "Invalid API key: ***",
    "GET https://host/v1?key=aB%2Fb&code=x1": "GET https://host/v1?key=***&code=***",
    "Set-Cookie: a=b1; c=d2": "Set-Cookie: ***",
}
SHOWN = (
    "s3://bucket/key and git@host:repo",
    "in transformers/hf_argparser.py",
    "train.py --use-auth --lr 1",
    'HF_TOKEN="$HF_TOKEN" torchrun',
    "tokens_per_second: 12, eos_token=</s>",
    "RuntimeError: shape [1, 2]: token 3",
    "ssh://git@host/x",
    "wandb.api_key: DeepSpeed 0.19.8 has no such setting",
    "--api_key --lr 3",
    "--text_key content --sort_key id",
    'A_TOKEN="${A_TOKEN:?as in your command}" x',
    "--start_token <s> --use_auth_token True",
    "--early_stop_pat 3 --bos_token [CLS]",
    "--initializer_token toy --instance_token sks --placeholder_token '<toy>' --class_token x",
    "--output_dir out/r8_lora_alpha_16 sk-exp-2024-lr3e-4 hf_llama3instruct8b2024",
    "--pwd /data/run --pwd ../run",
    "token 12 of 30; unexpected token in JSON at 12345678901234; --tokens 300B",
)


@pytest.mark.parametrize(("text", "shown"), [*HIDDEN.items(), *zip(SHOWN, SHOWN, strict=True)])
def test_secrets_in_texts(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
    assert hide_secrets(shown) == shown


def test_a_secret_that_is_cut_through_is_hidden_too() -> None:
    url = "https://me:hunter2secret@host/"
    for before in range(0, 420, 7):
        for text in ("a" * before + url + "b" * 2000, "b" * 2000 + url + "a" * before):
            shown = printable(text, 400)
            assert not any("hunter2secret"[i : i + 4] in shown for i in range(10)), shown


def test_no_line_of_a_long_key_is_shown() -> None:
    key = "\n".join(f"{n:02}".ljust(64, "k") for n in range(50))
    text = f"not a key: -----BEGIN PRIVATE KEY-----\n{key}\n-----END PRIVATE KEY-----"
    assert "kkkk" not in printable(text) + printable(f"{text}{'b' * 1500}")


def test_secrets_of_the_command_and_the_environment_are_hidden_wherever_they_occur(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [
        "dsat",
        "train.py",
        "--api_key",
        "horse-7-battery",
        "--name",
        "my-run-12",
        "PWD=/data/1",
    ]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("MY_PASSWORD", "staple_of_1")
    text = "my-run-12: 401 with horse-7-battery or staple_of_1, see /data/1"
    assert printable(text) == "my-run-12: 401 with *** or ***, see /data/1"
    assert shell_line(["x", "horse-7-battery"], Path()) == 'x "${ARGUMENT_1:?as in your command}"'


def test_names_of_secrets() -> None:
    secrets = "wandb.api_key --wandb-key OPENAI_KEY DB_PASS PGPASSWORD github_pat account_key "
    secrets += "HF_TOKEN hubToken ENV:TOKEN --api-key OPENAI_API_KEY apikey db_password "
    secrets += "aws_secret_access_key"
    harmless = "text_key sort_key num_pass second_pass pattern compass "
    harmless += "max_tokens tokenizer pad_token pad_token_id num_tokens author authority keys lr"
    assert [name for name in secrets.split() if not is_secret(name)] == []
    assert [name for name in harmless.split() if is_secret(name)] == []


def test_commands_and_values() -> None:
    words = ["train.py", "--token", "abc def", "--password=x", "--epochs", "3", "TOKEN=a b"]
    assert hide_secrets_in_words([*words, "--hub_token", "-abc"]) == [
        *("train.py", "--token", "***", "--password=***", "--epochs", "3", "TOKEN=***"),
        *("--hub_token", "***"),
    ]
    config = {"comet": {"api_key": "abc", "enabled": True}, "lr": 1, "args": words, "token": None}
    shown = json.dumps(hide_secrets_in_values(config))
    assert "abc" not in shown and '"lr": 1' in shown and '"token": null' in shown
    assert hide_secrets_in_words(["--token", f"--{KEY}", "--lr", "1"])[:2] == ["--token", STARS]
    several = ["--api_keys", KEY, f"{KEY}2", "train", "--lr", "1"]
    assert hide_secrets_in_words(several) == ["--api_keys", STARS, STARS, "train", "--lr", "1"]
    line = shell_line(several, Path())
    assert "${API_KEYS:" in line and "${API_KEYS_2:" in line
    flags = ["--token", "--epochs", "1"]
    assert hide_secrets_in_words(flags) == flags
    texts = {"max_tokens": 4096, "num_tokens": 10**9, "special_tokens": ["<s>"], "tokens": ["hi"]}
    assert hide_secrets_in_values(texts) == texts


def test_a_shell_asks_for_the_secrets_of_a_command() -> None:
    words = ["train.py", "--hub_token", "abc", "--wandb.api-key=x y", "--name", "a b", "it's"]
    line = shell_line(words, Path())
    assert hide_secrets(line) == line
    given = {"HUB_TOKEN": "p q", "WANDB_API_KEY": "r"}
    asked = subprocess.run(["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, env={})
    assert b"HUB_TOKEN: as in your command" in asked.stderr
    told = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {line}"], env=given, text=True)
    assert told.splitlines() == [
        *("train.py", "--hub_token", "p q", "--wandb.api-key=r", "--name", "a b", "it's")
    ]


def test_a_shell_gets_the_bytes_of_every_file_name() -> None:
    """Some are not UTF-8, and some are control characters, which must not reach a terminal."""
    names = [b"caf\xe9.json", b"it's\\a \x1b[31m\xff", "ü $x".encode(), b"--config=\xe9\r"]
    line = shell_line([os.fsdecode(name) for name in names], Path())
    assert printable(line) == line
    printed = ["bash", "-c", f"printf '%s\\n' {line}"]
    assert subprocess.check_output(printed) == b"".join(name + b"\n" for name in names)
    assert redacted_command([*map(os.fsdecode, names), f"--token={KEY}"]) == f"{line} '--token=***'"
    assert assignment("X", os.fsdecode(b"\xe9")) == r"X=$'\xe9'"


def test_a_shell_asks_for_every_word_that_hides_something() -> None:
    own, url = Path(f"/home/me/token={KEY}"), f"https://me:{KEY}@host"
    words = ["--config", f"{own}/best.json", "--url", url, f"run.url={url}", url, ""]
    words += ["--4_token", KEY, "--pwd", KEY, f"a/b={url}", "-h", url]
    names = "URL RUN_URL ARGUMENT_5 ARGUMENT_4_TOKEN ARGUMENT_PWD ARGUMENT_11 H".split()
    line = shell_line(words, own)
    assert STARS not in line and KEY not in line.replace(str(own), "")
    assert re.findall(r"\{(\w+):[?]", line) == names
    said = [*words[:3], "URL", "run.url=RUN_URL", "ARGUMENT_5", "", "--4_token", names[3], "--pwd"]
    printed = ["bash", "-c", f"printf '%s\\n' {line}"]
    told = subprocess.check_output(printed, env={name: name for name in names}, text=True)
    assert told.splitlines() == [*said, "ARGUMENT_PWD", "ARGUMENT_11", "-h", "H"]


@pytest.mark.parametrize("value", ["p$ssw0rd123", "$ecretPass1", ")hunter2", "&abc1", "a b"])
def test_no_secret_is_assigned_whatever_it_begins_with(value: str) -> None:
    assert value not in assignment("DB_PASSWORD", value)
    assert assignment("COLOUR", value) == f"COLOUR={shlex.quote(value)}"


@pytest.mark.parametrize(
    "text",
    [
        "GOOGLE_CREDENTIALS_BASE64={key}",
        "--api_keys {key}",
        "--cookie session={key}",
        "SSHPASS={key}",
        "SENTRY_DSN=https://abc@sentry.example/{key}",
        "https://hooks.slack.com/services/T0001/B0002/{key}",
        "postgres://user:p@{key}@db/x",
        "ValueError: invalid token {key}",
        "the password is {key}",
        "Incorrect API key provided: {key}",
        "authorization={key}",
        "--jwt {key}",
        "--bearer {key}",
        "--creds {key}",
        "--authtoken {key}",
        "--passcode {key}",
        "smtp.pw={key}",
        "comet.api.key={key}",
        "X-Amz-Signature={key}",
        "https://api.telegram.org/bot123456789:{key}/send",
        "glptt-{key}{key}",
        "ATATT3{key}",
        "figd_{key}",
    ],
)
def test_secrets_by_name_by_form_and_by_the_word_before(text: str) -> None:
    shown = printable(text.format(key=KEY))
    assert KEY not in shown and STARS in shown


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": [KEY]},
        {"tokens": {"hf": KEY}},
        {"auth": ["u", KEY]},
        {"token": 123456789012},
        {"comet": {"api": {"key": KEY}}},
        {"env": [{"name": "HF_TOKEN", "value": KEY}]},
    ],
)
def test_secrets_in_lists_and_objects_and_numbers(value: dict[str, Any]) -> None:
    shown = str(hide_secrets_in_values(value))
    assert KEY not in shown and "123456789012" not in shown
