"""Hosts for ssh: a scripted `ssh`, and a real sshd on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from dsat.engines.ports import free_ports
from testing.local import wait_until

# Runs the command on this machine, in another folder, without variables.
SSH = """#!/bin/sh
echo "$@" >> {folder}/given
if [ "$1" = -G ]; then
    shift
    [ "$1" = -p ] && echo port $2 && shift 2
    case $2 in
        *[*) echo 'hostname contains invalid characters' >&2; exit 255;;
        *..*) echo hostname $2;;
        head | localhost | tunnel | jump | back) echo hostname 127.0.0.1;;
        *) echo hostname 127.0.0.2;;
    esac
    case $2 in
        tunnel) echo port 2202;;
        jump) echo proxyjump bastion;;
        back) echo proxycommand nc;;
    esac
    exit
fi
while [ "$1" != -- ]; do shift; done
host=$2
shift 2
case $host in
    locked) echo 'eve@locked: Permission denied (publickey,password).' >&2; exit 255;;
    gone) echo 'ssh: connect to host gone port 22: Connection timed out' >&2; exit 255;;
    silent) exec sleep 2000;;
    *..*) echo "ssh: Could not resolve hostname $host" >&2; exit 255;;
    unknown) echo 'Host key verification failed.' >&2; exit 255;;
    tunnel | jump | localhost) path={folder}/elsewhere:;;
    back) echo Welcome back;;
esac
cd /
exec env -i PATH=$path/bin:/usr/bin sh -c "$*"
"""
CLIENT = """
Host n2
    HostName 127.0.0.2
Host n3
    HostName 127.0.0.3
Host locked
    HostName 127.0.0.4
Host n2 n3
    IdentityFile {folder}/key
Host *
    Port {port}
    IdentityFile none
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
"""
SERVER = """
Port {port}
ListenAddress 127.0.0.2
ListenAddress 127.0.0.3
ListenAddress 127.0.0.4
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
"""


def scripted_ssh(folder: Path) -> None:
    """Make a program `ssh` in a folder; it appends its arguments to the file `given`."""
    (folder / "elsewhere").mkdir(parents=True)
    (folder / "ssh").write_text(SSH.format(folder=folder))
    (folder / "elsewhere" / "uname").write_text("#!/bin/sh\necho container\n")
    for program in ("ssh", "elsewhere/uname"):
        (folder / program).chmod(0o700)


def missing() -> list[str]:
    """Return the programs of OpenSSH that are not installed."""
    return [name for name in ("ssh", "sshd") if shutil.which(name, path=_path()) is None]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Run an sshd; make a program `ssh` in the folder that is configured for it."""
    client, daemon = (shutil.which(name, path=_path()) for name in ("ssh", "sshd"))
    assert client is not None and daemon is not None
    [port] = free_ports(1)
    for name in ("key", "host_key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    (folder / "client").write_text(CLIENT.format(folder=folder, port=port))
    (folder / "server").write_text(SERVER.format(folder=folder, port=port))
    wrapped = shlex.join([client, "-F", str(folder / "client")])
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {wrapped} "$@"\n')
    (folder / "ssh").chmod(0o700)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([daemon, "-D", "-f", str(folder / "server")])
    try:
        reaches = [str(folder / "ssh"), "n2", "true"]
        wait_until(lambda: subprocess.run(reaches).returncode == 0, "sshd", 10)
        yield
    finally:
        process.terminate()
        process.wait(600)


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
