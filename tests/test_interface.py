"""The interface that leads to the other machines, on hosts whose own names lead to their loopback."""

from __future__ import annotations

import os
import sys

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
