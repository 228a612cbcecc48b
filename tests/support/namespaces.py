"""Provides two hosts on one machine. They are Linux network namespaces with a link between them, each with a host name
and an address.

Programs in them can reach only each other. As on Debian, a host's own name resolves to a loopback address, 127.0.1.1
(Debian policy, "hostname resolution"), where no other host can reach it. Needs root and iproute2.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HOSTS_FILES = Path("/etc/netns")
"""`ip netns exec NAME` replaces files of /etc by the files in the subfolder NAME of this folder (man ip-netns)."""

DEVICE = "eth0"
"""The network device of each host, which is its end of the link."""


@dataclass(frozen=True)
class Host:
    """One of the two hosts."""

    name: str
    """Name of the namespace, which is also the host name. The other host resolves it to `address`."""

    address: str

    def command(self, *command: str) -> list[str]:
        """Returns the command line that runs a command in this host. The process of this command line becomes the
        command itself."""
        as_host = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'  # sets the name in a new UTS namespace
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", as_host, self.name, *command]

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command in this host with these `options` of Popen. The command is killed when the hosts are
        removed."""
        return subprocess.Popen(self.command(*command), **options)

    def end_all(self) -> None:
        """Kills all processes in this host."""
        running = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        for process in map(int, running.split()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@dataclass(frozen=True)
class Hosts:
    """Two hosts and their link."""

    a: Host
    b: Host

    def queue(self, *discipline: str) -> None:
        """Sets the queueing discipline (tc(8)) of both ends of the link."""
        for host in (self.a, self.b):
            _run("tc", "-n", host.name, "qdisc", "replace", "dev", DEVICE, "root", *discipline)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Yields two linked hosts, which exist within the block. Skips the test, with the reason, if they cannot be
    made."""
    for tool in ("ip", "tc", "unshare"):
        if not shutil.which(tool):
            pytest.skip(f"two hosts on one machine need `{tool}` (Debian: apt-get install iproute2 util-linux)")
    hosts = Hosts(*(Host(f"cifar-zero-{os.getpid()}-{end}", f"10.77.0.{at}") for at, end in enumerate("ab", start=1)))
    try:
        try:
            _make(hosts)
        except (subprocess.CalledProcessError, OSError) as error:
            reason = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"network namespaces cannot be made here, they need root: {reason.strip()}")
        yield hosts
    finally:
        for host in (hosts.a, hosts.b):
            _remove(host)


def _make(hosts: Hosts) -> None:
    for host, other in ((hosts.a, hosts.b), (hosts.b, hosts.a)):
        _run("ip", "netns", "add", host.name)
        folder = HOSTS_FILES / host.name
        folder.mkdir(parents=True, exist_ok=True)
        names = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n"
        (folder / "hosts").write_text(names)
    a, b = hosts.a.name, hosts.b.name
    _run("ip", "link", "add", DEVICE, "netns", a, "type", "veth", "peer", "name", DEVICE, "netns", b)
    for host in (hosts.a, hosts.b):
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _run("ip", "-n", host.name, "link", "set", device, "up")
    _run(*hosts.a.command("true"))


def _remove(host: Host) -> None:
    """Kills all processes in a host, and removes the host and its end of the link. Does nothing if the host does not
    exist."""
    host.end_all()
    subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)
    shutil.rmtree(HOSTS_FILES / host.name, ignore_errors=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
