"""CIFAR's archives are read correctly, and no other archive is accepted. They are downloaded once, whole and checked,
or not at all."""

import hashlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

from cifar_zero import data
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core import atomic
from cifar_zero.core.errors import RunError
from cifar_zero.data.cifar import DownloadError, download
from cifar_zero.data.classes import CLASSES
from tests.data.archives import cifar_files, md5, publish, tar_gz
from tests.users_code.evil import Evil

FOLDER = "cifar-10-batches-py"
ARCHIVE = "cifar-10-python.tar.gz"


def write(files: dict[str, bytes], root: Path) -> None:
    """Writes the files of an archive as if it had been extracted."""
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "published", "num_classes"), [("cifar10", CIFAR10, 10), ("cifar100", CIFAR100, 100)], ids=str
)
def test_images_labels_and_names_are_those_of_the_files(
    name: str, published: type[CIFAR10], num_classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The root, which may be read-only, stays unchanged."""
    files = cifar_files(num_classes)
    publish(files, published, monkeypatch)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / published.filename).write_bytes(tar_gz(files))
    config = DataConfig(name, root=str(tmp_path / "root"), cache=str(tmp_path / "cache"))  # pyright: ignore[reportArgumentType]
    dataset = data.load(config, data.prepare(config))
    write(files, tmp_path)
    for train, images, labels in (
        (True, dataset.train_images, dataset.train_labels),
        (False, dataset.test_images, dataset.test_labels),
    ):
        expected = published(str(tmp_path), train)
        np.testing.assert_array_equal(images, expected.data)
        np.testing.assert_array_equal(labels, expected.targets)
    assert dataset.classes == CLASSES[name]
    assert not dataset.train_images.flags.writeable
    assert [path.name for path in (tmp_path / "root").iterdir()] == [published.filename]


def test_the_extracted_folder_is_used_where_its_sums_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files = cifar_files(10)
    write(files, tmp_path)
    config = DataConfig("cifar10", root=str(tmp_path), url="http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(RunError, match="cannot download"):  # these files are not the published ones
        data.prepare(config)
    assert "Preparing" not in capsys.readouterr().err
    publish(files, CIFAR10, monkeypatch)
    assert data.prepare(config) == "cifar10"
    assert capsys.readouterr().err == f"Preparing the images in {tmp_path}/.cifar-zero (only once).\n"


def test_files_that_are_not_the_published_ones_are_refused_whatever_the_sum_of_their_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = cifar_files(10)
    publish(files, CIFAR10, monkeypatch)
    hostile = pickle.dumps({"data": Evil(tmp_path / "evil")})
    without_one = {name: content for name, content in files.items() if not name.endswith("data_batch_5")}
    for wrong in (tar_gz(files | {f"{FOLDER}/test_batch": hostile}), tar_gz(without_one), tar_gz(files)[:-2000], b"no"):
        (tmp_path / ARCHIVE).write_bytes(wrong)
        monkeypatch.setattr(CIFAR10, "tgz_md5", md5(wrong))
        with pytest.raises(RunError, match="does not contain the published files of CIFAR10"):
            data.prepare(DataConfig("cifar10", root=str(tmp_path)))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_files_that_change_after_their_check_are_not_unpickled(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another process replaces the files as soon as a number of checksums has been computed."""
    files = cifar_files(10)
    publish(files, CIFAR10, monkeypatch)
    hostile = dict.fromkeys(files, pickle.dumps({"data": Evil(tmp_path / "evil"), "labels": []}))
    left = 0

    def place(content: dict[str, bytes], root: Path) -> None:
        if packed:
            (root / ARCHIVE).write_bytes(tar_gz(content))
        else:
            write(content, root)

    class Sum:
        def __init__(self, content: bytes = b"", **options: Any) -> None:
            self.sum = hashlib_md5(content, **options)
            self.update = self.sum.update

        def hexdigest(self) -> str:
            nonlocal left
            left -= 1
            if not left:
                place(hostile, root)
            return self.sum.hexdigest()

    hashlib_md5 = hashlib.md5
    monkeypatch.setattr(hashlib, "md5", Sum)
    for count in range(1, 9):
        root, left = tmp_path / str(count), count
        root.mkdir()
        place(files, root)
        with suppress(RunError):
            data.prepare(DataConfig("cifar10", root=str(root), url="http://127.0.0.1:9/archive"))
    assert not (tmp_path / "evil").exists()


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
