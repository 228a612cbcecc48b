"""The network interface through which the ranks of several machines reach each other; no torch.

gloo listens where the machine's own name leads: on Debian to 127.0.1.1, where no other machine reaches it. NCCL takes
an interface that begins with ib, else the first one but lo and docker*, which may be another program's bridge; what it
is told is a list of beginnings of names, `=eth1` where eth10 is not meant; the environment outweighs the files of the
administrator and the user, /etc/nccl.conf and what NCCL_CONF_FILE names or else ~/.nccl.conf (NVIDIA's user guide of
NCCL, "Environment Variables"). So NCCL is told nothing where it knows better.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import psutil

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Name the interface of gloo and of NCCL; whoever has set one knows better."""

INFINIBAND = "ib"
"""Begins the names of interfaces that NCCL prefers by itself."""

SYSTEM_WIDE = Path("/etc/nccl.conf")
"""Where an administrator sets NCCL's variables."""

ELSEWHERE = "192.0.2.1"
"""An address of no machine, kept for documentation (RFC 5737): the default route leads there."""

HERE = ("localhost", "127.0.0.1", "::1")


def settle(master: str) -> None:
    """Has gloo and NCCL take the interface that leads to the machine of rank 0, where that can be told.

    Args:
        master: its name or address, MASTER_ADDR.
    """
    if master not in HERE and (name := towards(master)):
        os.environ.setdefault(GLOO, name)
        if not _nccl_knows():
            os.environ.setdefault(NCCL, f"={name}")


def _nccl_knows() -> bool:
    """Whether a file names NCCL's interface, or there is one that it prefers."""
    own = os.environ.get("NCCL_CONF_FILE")
    for file in (SYSTEM_WIDE, Path(own) if own else Path("~/.nccl.conf").expanduser()):
        try:
            if any(line.strip().startswith(NCCL) for line in file.read_text().splitlines()):
                return True
        except (OSError, ValueError):  # there is none, or none that can be read
            continue
    return any(name.startswith(INFINIBAND) and stats.isup for name, stats in psutil.net_if_stats().items())


def towards(master: str) -> str:
    """The interface with the route to a machine; on that machine itself the one that has its address.

    Where its name is of the loopback, as rank 0's own may be: the interface of the default route, else the only one
    that is up. Empty where none of them is found.
    """
    owners = {address.address.split("%")[0]: name for name, of in psutil.net_if_addrs().items() for address in of}
    for target in (master, ELSEWHERE):
        if (own := own_address(target)) in owners:
            return owners[own]
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    others = {name for address, name in owners.items() if name in up and _leads_out(address)}
    return others.pop() if len(others) == 1 else ""


def own_address(target: str) -> str:
    """The address by which this machine speaks to another; empty where there is no way but the loopback."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # asks for the route: with UDP nothing is sent
            own = probe.getsockname()[0]
    except OSError:
        return ""
    return own if _leads_out(own) else ""


def address() -> str:
    """That of the interface that gloo has been given; empty where none has."""
    name = os.environ.get(GLOO, "")
    return next((of.address for of in psutil.net_if_addrs().get(name, ()) if of.family == socket.AF_INET), "")


def _leads_out(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a hardware address
        return False
    return not parsed.is_loopback and not (parsed.version == 6 and parsed.is_link_local)
