"""Secrets in commands and configurations, which no output and no shared file may contain.

The names are those of variables and flags that services document, and of Docker's official images.
The shapes are those of keys that GitHub's secret scanning detects (docs.github.com, "supported
secret scanning patterns"). Neither list is copied from dsat.
"""

from __future__ import annotations

import json
import random
import shlex
import string
from collections.abc import Callable
from typing import Any

import yaml

from testing.scenarios import User
from testing.soak import Hang, Tally, at_most, inputs
from testing.world import Failure, World

_NAMES = """
ANTHROPIC_API_KEY ATLASSIAN_CREDS AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET
AZURE_STORAGE_CONNECTION_STRING BITBUCKET_APP_PASSWORD COMET_API_KEY CONSUL_HTTP_TOKEN
COOKIE_SECRET DB_PASS DD_API_KEY DJANGO_SECRET_KEY ENCRYPTION_KEY GH_TOKEN GITHUB_PAT HF_TOKEN
HUGGING_FACE_HUB_TOKEN KAGGLE_KEY MINIO_ROOT_PASSWORD MLFLOW_TRACKING_PASSWORD MYSQL_PWD OPENAI_KEY
NGROK_AUTHTOKEN PGPASSWORD RABBITMQ_DEFAULT_PASS S3_SECRET SNOWFLAKE_PASSWORD SMTP_PW
SSH_KEY_PASSPHRASE VAULT_TOKEN WANDB_API_KEY WANDB_KEY
""".split()
_ALL = string.ascii_letters + string.digits
_LOWER, _HEX = string.ascii_lowercase + string.digits, "0123456789abcdef"
# Prefix, alphabet and length of keys that their shape reveals, whatever their name is.
_SHAPES = (
    *(("hf_", _ALL, 34), ("ghp_", _ALL, 36), ("github_pat_", _ALL, 82), ("glpat-", _ALL, 20)),
    *(("sk-proj-", _ALL, 48), ("sk-ant-api03-", _ALL, 93), ("AIza", _ALL, 35)),
    *(("AKIA", string.ascii_uppercase, 16), ("xoxb-", string.digits, 40), ("npm_", _ALL, 36)),
    *(("pypi-AgEIcHlwaS5vcmc", _ALL, 60), ("dop_v1_", _HEX, 64), ("hvs.", _ALL, 24)),
    *(("glptt-", _HEX, 40), ("ATATT3xFfGF0", _ALL, 60), ("figd_", _ALL, 40)),
    *(("nvapi-", _ALL, 64), ("dapi", _HEX, 32), ("ya29.", _ALL, 60)),
)
# Places of a secret with a name; a secret known by its shape has the place `unnamed`.
_PLACES: dict[str, Callable[[str, str], list[str]]] = {
    "--NAME VALUE": lambda name, value: [f"--{name.lower()}", value],
    "--NAME=VALUE": lambda name, value: [f"--{name.lower()}={value}"],
    "--na-me VALUE": lambda name, value: [f"--{name.lower().replace('_', '-')}", value],
    "--section.NAME VALUE": lambda name, value: [f"--trainer.{name.lower()}", value],
    "--section.NAME=VALUE": lambda name, value: [f"--trainer.logger.{name.lower()}={value}"],
    "section.NAME=VALUE": lambda name, value: [f"trainer.{name.lower()}={value}"],
    "+NAME=VALUE": lambda name, value: [f"+{name.lower()}={value}"],
    "a dictionary": lambda name, value: ["--config", json.dumps({name.lower(): value})],
    "a url": lambda name, value: ["--url", f"https://me:{value}@store.example/data"],
    "a url's token": lambda name, value: ["--url", f"https://{value}@store.example/data"],
    "a signed url": lambda name, value: ["--url", f"https://store.example/a?sv=1&sig={value}"],
}


def attack(seed: int, count: int) -> Tally:
    """Plant a secret, search with made-up trials, and look for the secret in outputs and files."""
    rng, tally = random.Random(seed), Tally()
    while tally.tried < count:
        where, name, value = _secret(rng)
        message = f"ConnectionError: {name}={value} was refused" if where == "message" else ""
        fails = (Failure("ERROR", {"stage": 3}, message),) if message else ()
        with inputs.a_user(World(slots=2, failures=fails)) as (user, experiment):
            _plant(experiment, where, name, value)
            (user.folder / "deepspeed.yaml").write_text(yaml.safe_dump(experiment))
            finding = _leak(user, value)
        tally.note(where, finding and f"{seed}/{tally.tried}: {name} as {where}: {finding}")
    return tally


def _secret(rng: random.Random) -> tuple[str, str, str]:
    """Draw a place, a name and a value; for a secret without a name, its prefix is returned."""
    where = rng.choice((*_PLACES, "unnamed", "variable", "hyperparameter", "message"))
    if where == "unnamed":
        prefix, alphabet, length = rng.choice(_SHAPES)
        return where, prefix, prefix + "".join(rng.choices(alphabet, k=length))
    value = "".join(rng.choices(_LOWER, k=rng.choice((12, 20, 40))))
    if where not in ("a url", "a url's token", "a signed url") and rng.random() < 0.2:
        value = rng.choice("-_+") + value
    return where, rng.choice(_NAMES), value if where != "a url's token" else f"{value}{value}"


def _plant(experiment: dict[str, Any], where: str, name: str, value: str) -> None:
    """Put a secret into an experiment's configuration."""
    if where == "variable":
        experiment["environment"] = {"environment_variables": [f"{name}={value}"]}
    elif where == "hyperparameter":
        experiment["hyperparameters"][name.lower()] = value
    words = ["--data", value] if where == "unnamed" else []
    words += _PLACES[where](name, value) if where in _PLACES else []
    experiment["entrypoint"] += f" {shlex.join(words)}"


def _leak(user: User, value: str) -> str:
    """Return where a secret appears after a dry run, a search and `show`; empty if nowhere."""
    options = "-mt 6 -m throughput --engine local --run-dir run --finals 2".split()
    said = ""
    for words in (
        ["random", "--dry-run", "deepspeed.yaml", "."],
        ["random", *options, "deepspeed.yaml", "."],
        ["show", "run"],
        ["show", "run", "--trials", "--json"],
    ):
        try:
            with at_most(inputs.LIMIT_S):
                told = user.types(*words)
        except (Hang, Exception) as error:
            return f"raised {error!r}"
        said += told.out + told.err
    if value in said:
        at = said.index(value)
        return "said: ..." + said[max(0, at - 80) : at + 20]
    run = user.folder / "run"
    kept = [path for path in run.rglob("*") if path.is_file()]
    if not kept:
        return f"no run: {said[-300:]}"
    told_in = [path for path in kept if value in path.read_text("utf-8", errors="replace")]
    # A file may contain the secret if only its owner can read it, except reports.
    is_open = run.stat().st_mode & 0o077
    leaks = [path for path in told_in if is_open and path.stat().st_mode & 0o077]
    leaks += [path for path in told_in if path.name in ("report.html", "summary.md")]
    return f"kept in {', '.join(path.name for path in leaks)}" if leaks else ""
