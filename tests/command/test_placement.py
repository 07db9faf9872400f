"""Which machines and devices of a hostfile dsat uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsat.command import entrypoint, placement

HOSTS = """
# two nodes
a slots=4
b slots=4   # the second one

c slots=2
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(HOSTS)
    Path("equal").write_text("a slots=2\nb slots=2\n")
    Path("unsaid").write_text("a\nb\n")
    Path("twice").write_text("a slots=1\nb slots=1\na slots=1\n")
    Path("one").write_text("a slots=3\n")
    Path("mpi").write_text("a slots=2 max_slots=4\nb\tslots=2\n")
    Path("none").write_text("a slots=2\nb slots=0\n")
    Path("without").write_text("a\nb max_slots=2\n")
    Path("train.py").touch()


def hosts_of(options: str) -> dict[str, tuple[int, ...]]:
    words = ["deepspeed", *options.split(), "train.py"]
    return dict(entrypoint.parse(words, Path.cwd()).launch.hosts)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--hostfile equal", {"a": (0, 1), "b": (0, 1)}),
        ("-H equal --num_gpus 1", {"a": (0,), "b": (0,)}),
        ("--hostfile=hosts --num_nodes 2", {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}),
        ("--hostfile hosts --exclude c", {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}),
        ("--hostfile hosts -e a:0,1@b:2,3", {"a": (2, 3), "b": (0, 1), "c": (0, 1)}),
        ("--hostfile hosts --include a:0,1@c", {"a": (0, 1), "c": (0, 1)}),
        ("--hostfile hosts --include c@a:0,1", {"a": (0, 1), "c": (0, 1)}),
        ("--hostfile hosts --include b", {"b": (0, 1, 2, 3)}),
        ("--hostfile unsaid", {"a": (), "b": ()}),
        ("--hostfile unsaid --include a:1@b:2", {"a": (1,), "b": (2,)}),
        ("--hostfile unsaid --num_gpus 2", {"a": (0, 1), "b": (0, 1)}),
        ("--hostfile one", {}),
        ("--hostfile none", {"a": (0, 1)}),
        ("--hostfile none --exclude b", {"a": (0, 1)}),
        ("--hostfile none --num_gpus 1", {"a": (0,)}),
        ("--hostfile mpi", {"a": (0, 1), "b": (0, 1)}),
        ("--hostfile missing --num_gpus 2", {}),
    ],
)
def test_machines_and_devices(options: str, found: dict[str, tuple[int, ...]]) -> None:
    assert list(hosts_of(options).items()) == list(found.items())


@pytest.mark.parametrize(
    ("options", "slots", "devices", "not_devices"),
    [
        ("", 3, (), ()),
        ("--exclude a:0", 2, (), (0,)),
        ("-e a:0,2", 1, (), (0, 2)),
        ("--include a:0,1", 2, (0, 1), ()),
    ],
)
def test_devices_of_a_hostfile_of_one_machine(
    options: str, slots: int, devices: tuple[int, ...], not_devices: tuple[int, ...]
) -> None:
    words = f"deepspeed --hostfile one {options} train.py"
    found = entrypoint.parse(words, Path.cwd())
    assert found.slots == slots and not found.launch.takes_all
    assert (found.launch.devices, found.launch.not_devices) == (devices, not_devices)


def test_a_hostfile_that_is_named_and_missing_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_HOSTFILE", "equal")
    assert hosts_of("") == hosts_of("--hostfile equal")
    monkeypatch.setattr(placement, "_HOSTFILE", "missing")
    assert hosts_of("--num_gpus 1") == {} and not caplog.messages
    hosts_of("-H missing")
    assert ["there is no hostfile missing" in message for message in caplog.messages] == [True]


def test_ranks_of_a_hostfile_have_the_variables_that_deepspeed_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd() / "home"))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    Path("home").mkdir()
    Path("home/.deepspeed_env").write_text("NCCL_IB_HCA=mlx5\nNCCL_DEBUG=INFO\n")
    Path(".deepspeed_env").write_text("NCCL_DEBUG=WARN\n\n")
    options = "--hostfile equal --master_addr 10.0.0.7 --ssh_port 2222"
    words = f"COLOUR=red deepspeed {options} train.py --x"
    found = entrypoint.parse(words, Path.cwd())
    assert (found.slots, found.args) == (None, ("--x",))
    assert (found.launch.takes_all, found.launch.passes_local_rank) == (True, True)
    assert (found.launch.master_address, found.launch.ssh_port) == ("10.0.0.7", 2222)
    assert found.env == {
        "COLOUR": "red",
        "PYTHONPATH": f"{Path.cwd()}:/mine",
        "NCCL_IB_HCA": "mlx5",
        "NCCL_DEBUG": "WARN",
    }
    assert entrypoint.parse("deepspeed --num_gpus 1 train.py", Path.cwd()).env == {}
