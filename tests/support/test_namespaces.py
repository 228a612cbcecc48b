"""The two hosts of the tests over several nodes are isolated, and their link can be slowed and cut."""

from __future__ import annotations

import subprocess
import time

from tests.support.helpers import HANG_SECONDS
from tests.support.namespaces import two_hosts

LISTEN = """
import socket
server = socket.create_server(("", 7777))
print("up", flush=True)
connection, _ = server.accept()
while connection.recv(65536): pass
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7777), timeout=float(sys.argv[2]))
connection.settimeout(None)
connection.sendall(bytes(500_000))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(socket.gethostname())
"""


def test_hosts_reach_each_other_only_over_their_link():
    with two_hosts() as hosts:
        names = hosts.a.name, hosts.b.name
        listening = hosts.a.start("python3", "-c", LISTEN, stdout=subprocess.PIPE)
        assert listening.stdout is not None
        listening.stdout.readline()
        hosts.cut()
        assert hosts.b.run("python3", "-c", SEND, hosts.a.name, "1").returncode
        hosts.mend()
        hosts.slow("8mbit")
        started = time.monotonic()
        sent = hosts.b.run("python3", "-c", SEND, hosts.a.name, str(HANG_SECONDS))
        assert sent.stdout.strip() == hosts.b.name, sent.stderr
        assert time.monotonic() - started > 0.4  # 4 million bits; a busy machine takes longer
        listening.wait(HANG_SECONDS)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in left for name in names)
