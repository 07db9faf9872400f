"""`show`, `runs`, `compare` and `watch` for runs that are running, finished, killed or damaged."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import statistics
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dsat
from dsat.values.outcome import ScriptSwitch
from testing.local import wait_until
from testing.scenarios import Harm, Terminal, User
from testing.started import Told
from testing.world import Failure, World

MICRO = "train_micro_batch_size_per_gpu"
ESCAPE = "\x1b[2J\x1b]0;owned\x07</script><img src=x onerror=alert(1)>"
RECORDED = Path(dsat.__file__).parents[1] / "testing" / "recorded_run"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[User, Told]:
    """Return a user with a finished search; in stage 3, the script prints terminal control
    codes."""
    hostile = Failure("ERROR", {"stage": 3}, f"ValueError: {ESCAPE}", ESCAPE)
    user = User(tmp_path_factory.mktemp("ran"), World(failures=(hostile,)))
    user.has()
    told = user.tunes("--max-trials", 14)
    assert told.status == 0, told.err
    return user, told


@pytest.fixture
def copied(ran: tuple[User, Told], user: User) -> User:
    """Return a user in another folder, whose `dsat_runs` contains two copies of the run."""
    for name in ("train-1", "train-3"):
        shutil.copytree(ran[0].folder / "run", user.folder / "dsat_runs" / name)
    return user


def states(user: User) -> dict[str, str]:
    rows = user.types("runs", "--json").json
    return {Path(row["run_dir"]).name: row["state"] for row in rows}


def test_a_run_is_shown_with_its_verdict_its_stages_and_its_files(ran: tuple[User, Told]) -> None:
    user, told = ran
    shown = user.types("show", "run")
    lines = shown.out.splitlines()
    assert lines[1 : 1 + len(told.json["verdict"])] == told.json["verdict"]
    assert lines[-2:] == ["run/best_ds_config.json", "run/report.html"]
    assert user.types("show", "run", "--json").json == {**told.json, "state": "finished"}
    assert f"{told.json['best_value'] * 1024:,.0f} tokens/s" in shown.out
    rows = [row for row in told.trials if row["predicted_bytes"] and row["outcome"] == "OK"]
    errors = [abs(row["predicted_bytes"] / row["used_bytes"] - 1) for row in rows]
    assert f"median error {100 * statistics.median(errors):.1f} %" in shown.out
    assert f"largest {100 * max(errors):.1f} % over {len(rows)} trials" in shown.out


def test_every_trial_has_a_line(ran: tuple[User, Told]) -> None:
    user, told = ran
    text = user.types("show", "run", "--trials").out
    for row in told.trials:
        [line] = [x for x in text.splitlines() if row["name"] in x.split()]
        speed = f"{row['metrics']['throughput']:.4g} samples/s" if row["metrics"] else "ERROR"
        assert speed in line and f" {row[MICRO]} " in line
    assert text.count("(best)") == text.count("(yours)") == 1
    assert user.types("show", "run", "--trials", "--json").json == told.trials


def test_the_line_of_a_trial_has_its_other_changes(tmp_path: Path) -> None:
    switches = {"dataloader_num_workers": ScriptSwitch((0, 2), in_arguments=True)}
    user = User(tmp_path, World(switches=switches))
    user.has({MICRO: 2})
    told = user.tunes("--max-trials", 8, "--zero-stages", 0, method="gridsearch")
    text = user.types("show", "run", "--trials").out
    for row in told.trials:
        [line] = [x for x in text.splitlines() if row["name"] in x.split()]
        changed = row["script_args"].get("dataloader_num_workers") == 2
        assert ("dataloader_num_workers 0 -> 2" in line) is changed
    assert "0 -> 2" in text


def test_one_trial_is_shown_in_full(ran: tuple[User, Told]) -> None:
    user, told = ran
    best = told.best
    text = user.types("show", "run", "--trial", best["name"]).out
    shown = user.types("show", "run", "--trial", best["name"], "--json").json
    assert shown["changes"][MICRO] == {"own": "1", "here": str(best[MICRO])}
    assert f"  output of {best['name']}" in text.splitlines()
    used = sum(shown["memory"][kind]["backward"] for kind in ("reserved_bytes",))
    assert f"{used / 2**30:.2f} GiB" in text and f"{best['metrics']['latency']:.4g} ms" in text
    wrong = user.types("show", "run", "--trial", "z9")
    assert wrong.status == 2 and "z9" in wrong.err and "--trials" in wrong.err


def test_what_a_script_writes_cannot_move_the_cursor(ran: tuple[User, Told]) -> None:
    user, told = ran
    failed = next(row["name"] for row in told.trials if row["outcome"] == "ERROR")
    log = user.folder / "run" / "trials" / failed / "stderr.log"
    log.write_bytes(b"\xff" + ESCAPE.encode() + b"x" * 10_000)
    one = ["show", "run", "--trial", failed]
    for words in (["show", "run"], ["show", "run", "--trials"], ["runs", "."], one):
        assert set("\x1b\x07") & set(user.types(*words).out) == set()
    assert "\\x1b[2J" in user.types(*one).out
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(user.reads("report.html"))
    assert "img" not in tags and tags.count("table") >= 1


def change_journal(user: User, change: Callable[[dict[str, Any]], object]) -> None:
    """Change each event of the run `dsat_runs/train-1`."""
    path = user.folder / "dsat_runs/train-1/journal.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        change(event)
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))


def test_a_strangers_journal_cannot_move_the_cursor(copied: User) -> None:
    def spoil(event: dict[str, Any]) -> None:
        if "plan" in event:
            event["plan"]["method"] = ESCAPE
            event["info"] = {**dict.fromkeys(event["info"], ESCAPE), ESCAPE: ESCAPE}
        if event["event"] == "stopped":
            event["reason"] = ESCAPE

    change_journal(copied, spoil)
    for words in ("show train-1", "show train-1 --trials", "runs", "compare train-1 train-3"):
        told = copied.types(*words.split())
        assert told.status == 0 and set("\x1b\x07") & set(told.out + told.err) == set()
    assert "\\x1b[2J" in told.out


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", "", "a\0", ESCAPE])
def test_a_strangers_journal_cannot_lead_out_of_its_folder(copied: User, name: str) -> None:
    change_journal(copied, lambda event: event.get("trial", {}).update(name=name))
    shown = copied.types("show", "train-1", "--trial", "0")
    assert shown.status == 1 and "is damaged: trial " in shown.err, shown.err


@pytest.mark.slow
def test_a_terminal_gets_a_live_table(user: User) -> None:
    user.pause_s = 0.3
    words = user.words("--max-trials", 8, method="random", shown=True)
    told = user.types(*words, harm=Harm(terminal=Terminal(columns=200)))
    assert told.status == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", told.out)
    assert "1 of at most 8 trials" in text
    assert "Train with it: cd " in text and "\x1b[" in told.out
    assert "\x1b" not in user.types("show", "run").out


@pytest.mark.slow
def test_a_run_is_looked_at_while_it_goes_on(user: User) -> None:
    user.pause_s = 0.5
    started = user.starts(*user.words("--max-trials", 12, method="random"))
    journal = user.folder / "run" / "journal.jsonl"
    wait_until(lambda: journal.exists() and journal.read_text().count('"finished"') >= 2, "trials")
    shown = user.types("show", "run", "--json").json
    assert shown["state"] == "running" and shown["stop_reason"] is None
    wait_until(lambda: "running" in user.types("show", "run", "--trials").out, "a trial")
    assert "(running)" in user.types("show", "run").out
    started.signal(signal.SIGKILL)
    started.wait()
    assert user.types("show", "run", "--json").json["state"] == "interrupted"
    text = user.types("show", "run", "--trials").out
    assert "interrupted" in text and "running" not in text


def test_a_page_is_served(ran: tuple[User, Told]) -> None:
    user, told = ran
    started = user.starts("watch", "run", "--json")
    base = started.read_json()["url"]
    with urllib.request.urlopen(f"{base}state", timeout=60) as answer:
        state = json.load(answer)
    assert told.best["name"] in state["html"] and "\x1b" not in state["html"]
    port = base.split(":")[2].partition("/")[0]
    with socket.create_connection(("127.0.0.1", int(port))) as asking:
        asking.sendall(b"GET http://[::1 HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert b" 404 " in asking.recv(64)
    taken = user.types("watch", "run", "--port", port)
    assert taken.status == 2 and f"--port {port}: " in taken.err
    started.signal(signal.SIGINT)
    assert started.wait().status == 0
    with mock.patch.object(socket.socket, "bind", side_effect=OSError(1, "Not permitted")):
        refused = user.types("watch", "run")
    assert refused.status == 2 and "a port of 127.0.0.1: Not permitted" in refused.err


def test_values_of_switches_that_are_secret_are_not_shown(user: User) -> None:
    user.has()
    key, options = "q7t6rpvlfv4j", ("--max-trials", 12, "--finals", 0)
    user.world = World(effects={f"ENV:API_KEY={key}": 0.5})
    told = user.tunes(f"--vary=ENV:API_KEY={key},0", *options)
    assert told.best["script_args"] == {"ENV:API_KEY": "***"} and key not in told.err
    user.types(*user.words(*options, run_dir="other"))
    shown = user.types("compare", "run", "other").out
    assert "ENV:API_KEY" in shown and key not in shown


def test_runs_are_listed_the_newest_first(copied: User) -> None:
    for number, changed_s in ((1, 2e9), (3, 1e9)):
        journal = copied.folder / "dsat_runs" / f"train-{number}" / "journal.jsonl"
        os.utime(journal, (changed_s, changed_s))
    assert list(states(copied)) == ["train-1", "train-3"]
    assert "dsat_runs/train-1 " in copied.types("show").out


def test_folders_are_numbered_and_the_newest_goes_on(copied: User) -> None:
    copied.cut(5, "dsat_runs/train-3")
    told = copied.types(*copied.words("--max-trials", 14, "--resume", run_dir=""))
    assert told.json["run_dir"] == "dsat_runs/train-3" and len(told.trials) > 5
    words = copied.words("--max-trials", 14, run_dir="")
    assert copied.types(*words).json["run_dir"] == "dsat_runs/train-4"
    (copied.folder / "dsat_runs" / "train-7x").mkdir()
    assert copied.types(*words).json["run_dir"] == "dsat_runs/train-5"


def test_the_run_of_the_same_options_goes_on_and_a_refusal_names_the_run(user: User) -> None:
    def types(*options: object, argument: str = "8") -> Told:
        words = user.words("--max-trials", 6, *options, run_dir="", method="random")
        return user.types(*words, "--batch-size", argument)

    for stages in ((1,), (1, 2)):
        types("--zero-stages", *stages)
    user.cut(5, "dsat_runs/train-1")
    assert types("--zero-stages", 1, "--resume").json["run_dir"] == "dsat_runs/train-1"
    refused = types("--zero-stages", 0, "--resume")
    assert refused.status == 2 and "dsat_runs/train-" in refused.err
    assert "zero stages was [1" in refused.err
    refused = types("--zero-stages", 1, "--resume", argument="4")
    assert refused.status == 2 and "its arguments, " in refused.err, refused.err
    assert not re.search("[0-9a-f]{16}", refused.err)


def test_results_without_a_journal_are_never_written(copied: User) -> None:
    """In the last release, a search on a cluster left such a folder."""
    results = copied.folder / "dsat_runs" / "train-5"
    results.mkdir()
    for name in ("summary.md", "best_ds_config.json", "best_ds_metrics.json"):
        shutil.copy(copied.folder / "dsat_runs" / "train-1" / name, results)
    before = {path: path.read_bytes() for path in results.iterdir()}
    assert copied.types("show", "train-5").status == 2
    again = copied.types(*copied.words("--max-trials", 14, "--resume", run_dir=""))
    assert again.json["run_dir"] == "dsat_runs/train-3"
    refused = copied.types(*copied.words("--max-trials", 14, run_dir="dsat_runs/train-5"))
    assert refused.status == 2 and "dsat_runs/train-5" in refused.err
    assert {path: path.read_bytes() for path in results.iterdir()} == before


def test_a_folder_without_runs_is_said(user: User) -> None:
    listed = user.types("runs")
    assert listed.status == 0 and "dsat_runs" in listed.err


def test_a_run_of_another_user_is_named_with_the_reason(copied: User) -> None:
    def loses_privileges() -> None:
        """Drop what lets root read private folders (`capset` of Linux)."""
        version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
        assert ctypes.CDLL(None).capset(version_3, (ctypes.c_uint32 * 6)()) == 0

    (copied.folder / "dsat_runs/train-1").chmod(0)
    other = Harm(before=loses_privileges)
    listed = copied.types("runs", "--json", harm=other)
    assert [Path(row["run_dir"]).name for row in listed.json] == ["train-3"]
    shown = copied.types("show", "train-1", harm=other)
    for told in (listed, shown):
        assert "dsat_runs/train-1/journal.jsonl" in told.err and "Permission denied" in told.err
    assert shown.status == 1 and copied.types("show", harm=other).status == 0
    words = copied.words("--max-trials", 14, "--resume", run_dir="")
    assert copied.types(*words, harm=other).json["run_dir"] == "dsat_runs/train-3"
    named = copied.words("--max-trials", 14, "--resume", run_dir="dsat_runs/train-1")
    refused = copied.types(*named, harm=other)
    assert refused.status == 1 and "Permission denied" in refused.err


def test_runs_that_are_damaged_or_of_other_versions(copied: User) -> None:
    shutil.copytree(RECORDED, copied.folder / "dsat_runs" / "release-1")
    copied.cut(4, "dsat_runs/train-1")
    start = (copied.folder / "dsat_runs/train-3/journal.jsonl").read_text().splitlines()[0]
    newer = re.sub(r'"schema": ?(\d+)', '"schema": 99', start)
    whole = (copied.folder / "dsat_runs/train-3/journal.jsonl").read_text()
    nested = '{"x":' * 500 + "{}" + "}" * 500
    for name, text in (
        ("torn", '{"event":"other"}\nno\n'),
        ("none", '{"a":1}\n'),
        ("newer", f"{newer}\n"),
        ("instant", re.sub(r'"latency":[\d.]+', '"latency":0.0', whole)),
        ("deep", whole.replace('"base_config":{', f'"base_config":{{"x":{nested},')),
        ("switch", whole.replace('"script_args":{}', '"script_args":{"fused_adam2":true}')),
    ):
        folder = copied.folder / "dsat_runs" / name
        folder.mkdir()
        (folder / "journal.jsonl").write_text(text)
    told = copied.types("runs", "--json")
    found = {Path(row["run_dir"]).name: row["state"] for row in told.json}
    finished = dict.fromkeys(("train-3", "release-1", "switch"), "finished")
    assert found == {**finished, "train-1": "interrupted"}
    assert "fused_adam2=True" in copied.types("show", "switch").out
    assert copied.types("export", "switch", "--to", "csv").status == 0
    for name in ("instant", "deep"):
        assert f"dsat_runs/{name}: cannot be shown" in told.err
    for name, line in (("torn", "line 2"), ("none", "line 1"), ("newer", "newer")):
        [said] = [x for x in told.err.splitlines() if f"dsat_runs/{name}/journal.jsonl" in x]
        assert line in said
        refused = copied.types("show", name)
        assert refused.status in (1, 2) and "Traceback" not in refused.err
    assert dsat.load_run(RECORDED).gain == pytest.approx(1.763, abs=0.001)


def test_two_runs_side_by_side(copied: User) -> None:
    copied.world = World(seed=3, effects={"z1": 1.25, "z2": 1.25, "z3": 1.25, "z0": 1.25})
    copied.tunes("--max-trials", 14)
    told = copied.types("compare", "train-1", "run", "--json").json
    values = {name: run["best_value"] for name, run in told["runs"].items()}
    assert values["run"] == pytest.approx(values["train-1"] / 1.25, rel=0.1)
    other = copied.folder / "dsat_runs" / "train-3" / "journal.jsonl"
    same = copied.types("compare", "train-1", "dsat_runs/train-3")
    assert same.status == 0 and "different arguments" not in same.out
    text = re.sub('"program":"[^"]+"', '"program":"of a longer sample"', other.read_text())
    other.write_text(text)
    assert "different arguments" in copied.types("compare", "train-1", "dsat_runs/train-3").out
    copied.tunes("--max-trials", 4, "--run-dir", "other", metric="latency")
    said = copied.types("compare", "train-1", "other").out
    assert "different metrics" in said
    for words in (("train-1", "train-1"), ("train-1", "dsat_runs/train-1")):
        assert copied.types("compare", *words).status == 2


@pytest.mark.slow
def test_a_shell_completes_commands_options_and_choices(user: User) -> None:
    def completed(line: str) -> set[str]:
        found = user.folder / "found"
        variables = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        user.types(harm=Harm(variables=variables))
        return {word.strip() for word in found.read_text().splitlines()}

    assert completed("dsat comp") == {"compare"}
    assert completed("dsat model --trial-time") == {"--trial-timeout"}
    assert {"throughput", "latency"} <= completed("dsat model --metric ")


def test_the_command_to_train_with_is_pasted_from_a_narrow_terminal(user: User) -> None:
    """A shell reads it from a pseudo-terminal as one line, with no argument broken."""
    words = user.words("--max-trials", 4, method="random", shown=True)
    told = user.types(*words, harm=Harm(terminal=Terminal(columns=60)))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", told.out)
    [pasted] = re.findall(r"Train with it: (.*)\r\n", text)
    assert f"`{pasted}`" in user.reads("summary.md")
    folder, words = pasted.removeprefix("cd ").split(" && ")
    program = next(word for word in shlex.split(words) if "=" not in word)
    (user.folder / Path(program).name).write_text(
        '#!/bin/sh\nprintf "%s\\n" "$PWD" "$@" > pasted\n'
    )
    (user.folder / Path(program).name).chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve("/bin/sh", ["sh"], {**os.environ, "PATH": f"{user.folder}:{os.environ['PATH']}"})
    os.write(terminal, f"{pasted}\nexit\n".encode())
    with contextlib.suppress(OSError):  # the shell has closed it
        while os.read(terminal, 4096):
            pass
    os.waitpid(pid, 0)
    os.close(terminal)
    arrived = (Path(folder) / "pasted").read_text().splitlines()
    assert arrived == [folder, *shlex.split(words)[shlex.split(words).index(program) + 1 :]]


@pytest.mark.parametrize("columns", [60, 80])
def test_names_of_trials_are_whole_on_a_narrow_terminal(
    ran: tuple[User, Told], columns: int
) -> None:
    user, told = ran
    shown = user.types("show", "run", "--trials", harm=Harm(terminal=Terminal(columns=columns)))
    for row in told.trials:
        assert row["name"] in shown.out
    best = {row["name"] for row in told.trials if row["name"] in user.types("show", "run").out}
    shown = user.types("show", "run", harm=Harm(terminal=Terminal(columns=columns)))
    assert all(name in shown.out for name in best)
