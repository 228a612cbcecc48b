"""The archive is downloaded once, whole and checked, or not at all."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from torchvision.datasets import CIFAR10

from cifar_zero import data
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core import atomic
from cifar_zero.data.cifar import DownloadError, download
from tests.data.archives import cifar_files, md5, publish, tar_gz


class Handler(SimpleHTTPRequestHandler):
    """Notes the paths of downloads. torchvision first sends HEAD in a header, to locate the file."""

    downloads: list[str]

    def do_GET(self) -> None:
        if self.headers.get("Method") != "HEAD":
            self.downloads.append(self.path)
        super().do_GET()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Returns the address of a web server on this machine for the folder `served`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(Handler, "downloads", [], raising=False)
    (tmp_path / "served").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "served"))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/archive"
        server.shutdown()


def test_four_runs_with_two_caches_download_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch):
    """The four runs are threads instead of processes, because file locks treat both the same."""
    files = cifar_files(10)
    publish(files, CIFAR10, monkeypatch)
    (tmp_path / "served" / "archive").write_bytes(tar_gz(files))

    def prepare(cache: str) -> tuple[str, int]:
        config = DataConfig("cifar10", root=f"{tmp_path}/root", cache=f"{tmp_path}/{cache}", url=url)
        dataset = data.load(config, data.prepare(config))
        return dataset.name, int(dataset.train_images.sum())

    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(prepare, ("one", "one", "two", "two"))}) == 1
    assert Handler.downloads == ["/archive"]


@pytest.mark.parametrize("link", [False, True])
def test_a_wrong_file_is_refused_and_leaves_nothing(link: bool, tmp_path: Path, url: str):
    """This also holds if a killed run has left a part of a file, or if another user has placed a link there."""
    target, archive = tmp_path / "target", tmp_path / "folder" / "archive"
    target.write_text("mine")
    archive.parent.mkdir()
    if link:
        atomic.staged(archive).symlink_to(target)
    else:
        atomic.staged(archive).write_bytes(b"x")
    (tmp_path / "served" / "archive").write_bytes(b"wrong")
    with pytest.raises(DownloadError, match=r"File not found or corrupted\.; fix$"):
        download(url, archive, md5(b"right"), "fix")
    assert target.read_text() == "mine"
    assert not list(archive.parent.iterdir())
