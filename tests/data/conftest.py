"""Provides a web server on this machine that serves tiny CIFAR archives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.data.archives import ArchiveServer, cifar_files, tar_gz


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], ArchiveServer]]:
    """Returns a function that starts a server for the given content. The server stops after the test."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(content: bytes) -> ArchiveServer:
        server = ArchiveServer(content)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def closed_url(serve: Callable[[bytes], ArchiveServer]) -> str:
    """Returns an address at which no server listens."""
    server = ArchiveServer(b"")
    server.server_close()
    return server.url


@pytest.fixture
def archive10() -> bytes:
    """Returns a CIFAR-10 archive of 5 x 20 + 20 images."""
    return tar_gz(cifar_files(10))
