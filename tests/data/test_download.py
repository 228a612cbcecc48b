"""The archive is downloaded once, whole and checked, or not at all."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from torchvision.datasets import CIFAR10

from cifar_zero import data
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core import atomic
from cifar_zero.data.cifar import DownloadError, download
from tests.data.archives import ArchiveServer, cifar_files, md5, publish, tar_gz

Serve = Callable[[bytes], ArchiveServer]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Returns a function that starts a web server on this machine for the given content. The server stops after the
    test."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ExitStack() as servers:

        def start(content: bytes) -> ArchiveServer:
            server = servers.enter_context(ArchiveServer(content))
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            servers.callback(server.shutdown)
            return server

        yield start


def test_four_runs_with_two_caches_download_once(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """The four runs are threads instead of processes, because file locks treat both the same."""
    files = cifar_files(10)
    publish(files, CIFAR10, monkeypatch)
    server = serve(tar_gz(files))

    def prepare(cache: str) -> tuple[str, int]:
        config = DataConfig("cifar10", root=f"{tmp_path}/root", cache=f"{tmp_path}/{cache}", url=server.url)
        dataset = data.load(config, data.prepare(config))
        return dataset.name, int(dataset.train_images.sum())

    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(prepare, ("one", "one", "two", "two"))}) == 1
    assert server.tries == 1


@pytest.mark.parametrize("link", [False, True])
def test_a_wrong_file_is_refused_and_leaves_nothing(link: bool, tmp_path: Path, serve: Serve):
    """This also holds if a killed run has left a part of a file, or if another user has placed a link there."""
    target, archive = tmp_path / "target", tmp_path / "folder" / "archive"
    target.write_text("mine")
    archive.parent.mkdir()
    if link:
        atomic.staged(archive).symlink_to(target)
    else:
        atomic.staged(archive).write_bytes(b"x")
    with pytest.raises(DownloadError, match=r"File not found or corrupted\.; fix$"):
        download(serve(b"wrong").url, archive, md5(b"right"), "fix")
    assert target.read_text() == "mine"
    assert not list(archive.parent.iterdir())
