"""Hosts over ssh: with a fake ssh client, and with a real sshd on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsat.cli.main import main
from dsat.engines.machines.machine import Machine
from dsat.engines.places import base, ssh
from dsat.engines.places import local as this_machine
from dsat.errors import EngineError, UserInputError
from dsat.tuning import local
from testing import ssh_server
from testing.command import ADAM, FAST, run_of
from testing.local import PROGRAMS, cpu_machine, processes_of, wait_until

SHOWS = """
import os, sys
print([os.getcwd(), os.environ["OWN"], *sys.argv[1:], sys.stdin.read()])
sys.exit(3)
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a scripted ssh first on the PATH; it appends its arguments to the file `given`."""
    folder = tmp_path / "bin"
    ssh_server.scripted_ssh(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def started(*command: str) -> subprocess.Popen[bytes]:
    [host] = ssh.reach(["far"], None)
    assert not callable(host.reach)
    return subprocess.Popen([*host.reach, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# -- a command on a host


def test_a_command_has_our_pipes_our_folder_and_our_variables(
    scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's $HOME"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS.parents[1]))
    monkeypatch.setenv("OWN", "a 'b'\n$c")
    monkeypatch.chdir(folder)
    with started(sys.executable, "-c", SHOWS, "x y", "`z`\n") as process:
        out, _ = process.communicate(b"input\n" * 50_000, timeout=600)
    expected = [str(folder), "a 'b'\n$c", "x y", "`z`\n", "input\n" * 50_000]
    assert out.decode() == f"{expected}\n"
    assert process.returncode == 3
    assert "'b'" not in (scripted / "given").read_text(), "others see arguments, not variables"


@pytest.mark.usefixtures("scripted")
def test_the_end_of_a_command_is_seen_although_nothing_is_said_to_it_any_more() -> None:
    with started("/bin/echo", "done") as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.read() == b"done\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(600) == 0


@pytest.mark.usefixtures("scripted")
def test_a_command_hears_of_our_end(tmp_path: Path) -> None:
    wait_for_end = (
        "import sys; print('there', flush=True); sys.stdin.read(); open(sys.argv[1], 'w')"
    )
    with started(sys.executable, "-c", wait_for_end, str(tmp_path / "ended")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.kill()
        wait_until((tmp_path / "ended").exists, "the command's end")


# -- which hosts


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("name", "told", "keys"),
    [
        ("locked", r"eve@locked: Permission denied \(publickey,password\)", True),
        ("gone", "ssh: connect to host gone port 22: Connection timed out", False),
        ("unknown", "Host key verification failed", True),
        ("typo..example", "ssh: Could not resolve hostname typo..example", False),
    ],
)
def test_a_host_that_asks_or_does_not_answer_is_refused(name: str, told: str, keys: bool) -> None:
    """The refusal is told before another host has answered."""
    with pytest.raises(UserInputError, match=f"cannot log in to host {name} .*: {told}") as raised:
        ssh.reach(["silent", name, "head"], None)
    assert f"`ssh -o BatchMode=yes {name} true` must work" in str(raised.value)
    assert ("accept the host's key" in str(raised.value)) is keys
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("scripted")
def test_a_range_of_hosts_is_no_name() -> None:
    with pytest.raises(EngineError, match=r"`ssh -G n\[1-2\]`.*: hostname contains invalid char"):
        ssh.reach(["n[1-2]", "head"], None)


@pytest.mark.usefixtures("scripted")
def test_this_machine_comes_first_and_is_named_once() -> None:
    found = ssh.reach(["far", "head"], 2222)
    assert [(host.name, host.is_here) for host in found] == [("head", True), ("far", False)]
    assert found[0].reach == ()
    assert not callable(found[1].reach)
    assert found[1].reach[1:] == ("-m", "dsat.engines.places.ssh_run", "--port", "2222", "far")
    assert found[0].address == "127.0.0.1", "by which the other one reaches it"
    with pytest.raises(UserInputError, match="lists this machine twice: head, localhost"):
        ssh.reach(["head", "localhost"], None)


@pytest.mark.usefixtures("scripted")
def test_an_address_of_this_machine_behind_a_port_or_a_proxy_may_be_another_host() -> None:
    for name, port, is_here in (
        ("tunnel", None, False),
        ("jump", None, False),
        ("back", None, True),
        ("localhost", 2222, False),
        ("localhost", None, True),
    ):
        [found] = ssh.reach([name], port)
        assert found.is_here is is_here, name
        assert bool(found.reach) is not is_here
    with pytest.raises(UserInputError, match="lists this machine twice: head, back"):
        ssh.reach(["head", "back"], None)
    for name in ("tunnel", "jump"):
        told = rf"ssh reaches host {name} at 127\.0\.0\.1, an address of this machine.*HostName"
        with pytest.raises(UserInputError, match=told):
            ssh.reach(["head", name], None)


def test_without_ssh_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(UserInputError, match="needs ssh, which is not installed"):
        ssh.reach(["far"], None)


@pytest.mark.slow
@pytest.mark.usefixtures("scripted")
def test_a_hostfiles_machines_are_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(PROGRAMS / "tiny", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    Path("hosts").write_text("far slots=2\nhead slots=2\n")

    def find_machines(prefixes: dict[str, tuple[str, ...]]) -> list[Machine]:
        assert list(prefixes) in (["head", "far"], ["far"])
        return [cpu_machine(4)] * len(prefixes)

    monkeypatch.setattr(base, "find_machines", find_machines)
    monkeypatch.setattr(this_machine, "find_machine", lambda *_: cpu_machine(3))
    monkeypatch.setattr(local, "LocalEngine", None)  # nothing is ever run
    script = ("train.py", "--deepspeed_config", "ds_config.json")
    command = ("deepspeed", "--hostfile", "hosts", *script)
    for options, told in (
        ((), "on 2 hosts (head, far), each with 2 CPU cores (test, 8 GiB), 4 devices per trial"),
        (("--slots", "2"), "each with 2 CPU cores (test, 8 GiB), 2 devices per trial"),
        (("--engine", "local"), "on 3 CPU cores (test, 8 GiB), 3 devices per trial"),
    ):
        assert main(["model", "--dry-run", *options, "--", *command]) == 0
        assert told in capsys.readouterr().out
    alone = (*command[:3], "--num_nodes", "1", *script)
    assert main(["model", "--dry-run", "--", *alone]) == 0
    assert "on 1 host (far) with 2 CPU cores (test, 8 GiB), 2 devices" in capsys.readouterr().out
    assert main(["model", "--slots", "3", "--dry-run", "--", *command]) == 2
    assert "on whole hosts (a multiple of 2, up to 4)" in capsys.readouterr().err
    Path("hosts").write_text("far slots=5\nhead slots=5\n")
    assert main(["model", "--dry-run", "--", *command]) == 2
    told = "--hostfile: chooses devices 0, 1, 2, 3, 4 of host head, but it has 4 CPU cores (test, "
    assert told in capsys.readouterr().err
    Path("hosts").write_text("far slots=2\nlocked slots=2\n")
    assert main(["model", "--dry-run", "--", *command]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("dsat: error: ") and "locked" in last


# -- a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start hosts n2 and n3, and a host that refuses the key."""
    if lacks := ssh_server.missing():
        pytest.skip(f"{', '.join(lacks)} not found: make test-cluster installs them")
    folder = tmp_path_factory.mktemp("ssh")
    with ssh_server.running(folder), pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.usefixtures("server")
def test_a_search_on_two_machines_of_a_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, run_dir = tmp_path / "work", tmp_path / "run"
    shutil.copytree(PROGRAMS / "memory", work)
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS.parents[1]))
    monkeypatch.chdir(work)
    Path("ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM}))
    script = ["train.py", "--deepspeed_config", "ds.json"]
    options = ["--run-dir", str(run_dir), "--max-trials", "2", *FAST, "--slot-memory", "1GiB"]

    def tuned_with(hostfile: str) -> subprocess.CompletedProcess[str]:
        Path("hosts").write_text(hostfile)
        command = [sys.executable, "-m", "dsat", "random", *options, "--"]
        command += ["deepspeed", "--no_local_rank", "--hostfile", "hosts", *script]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    refused = tuned_with("n2 slots=1\nlocked slots=1\n")
    assert refused.returncode == 2
    assert "host locked without a prompt: " in refused.stderr
    assert "Permission denied" in refused.stderr.splitlines()[-1]
    told = tuned_with("n2 slots=1\nn3 slots=1\n")
    assert told.returncode == 0, told.stdout + told.stderr
    assert "2 hosts (n2, n3), each with 1 CPU core" in told.stdout
    run = run_of(run_dir)
    assert run.best is not None
    folder = run_dir / "trials" / run.best.name
    second = (folder / "cmd.txt").read_text().partition("# on n3\n")[2].split()
    assert {"RANK=1", "CROSS_RANK=1", "MASTER_ADDR=127.0.0.2"} <= set(second)
    wait_until(lambda: not processes_of(run_dir), "the end of all processes", 10)
