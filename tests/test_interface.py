"""The interface that leads to the other machines, on hosts whose own names lead to their loopback."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import interface
from tests.helpers import ROOT
from tests.namespaces import DEVICE, Host, two_hosts

PRINT = "import sys, interface; print(interface.towards(sys.argv[1]))"


def towards(host: Host, master: str) -> str:
    return host.run(sys.executable, "-c", PRINT, master, cwd=ROOT).stdout.strip()


def test_of_two_hosts():
    with two_hosts() as hosts:
        assert towards(hosts.b, hosts.a.name) == DEVICE
        assert towards(hosts.a, hosts.a.address) == DEVICE
        assert towards(hosts.a, hosts.a.name) == DEVICE  # 127.0.1.1 there: the only one that is up


def test_whoever_has_set_one_knows_better(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interface, "towards", lambda master: "eth7")
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "ib0"})
    interface.settle("localhost")
    assert os.environ == {"NCCL_SOCKET_IFNAME": "ib0"}
    interface.settle("host")
    assert os.environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth7"}


def test_nccl_is_told_where_it_does_not_know_better(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    up: list[str] = ["eth7"]
    file = tmp_path / "nccl.conf"

    def told() -> str | None:
        monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(file)})
        interface.settle("host")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        return os.environ.get("NCCL_SOCKET_IFNAME")

    monkeypatch.setattr(interface, "towards", lambda master: "eth7")
    monkeypatch.setattr(interface, "SYSTEM_WIDE", tmp_path / "none")
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True) for name in up})
    assert told() == "=eth7"  # alone it would mean eth70 too
    file.write_text("NCCL_DEBUG=WARN\n")
    assert told() == "=eth7"
    file.write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ens\n")
    assert told() is None
    file.unlink()
    up.append("ib0")
    assert told() is None
