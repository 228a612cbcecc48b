"""The archive comes over the network once, whole and checked, or not at all."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sources
from sources import download as module
from sources.download import DownloadError, download
from tests.sources.archives import ArchiveServer, md5

Serve = Callable[[bytes], ArchiveServer]
CONTENT = bytes(range(256)) * 4096  # 1 MiB: more than one chunk
REPOSITORY = Path(sources.__file__).parents[1]

PREPARE = """
import json, sys
import numpy as np
import pytest
from torchvision.datasets import CIFAR10
import sources
from config import DataConfig
from tests.sources.archives import cifar_files, publish
publish(cifar_files(10), CIFAR10, pytest.MonkeyPatch())
config = DataConfig(**json.loads(sys.argv[1]))
name = sources.prepare(config)
data = sources.load(config, name)
print(json.dumps([name, len(data.classes), int(np.sum(data.train_images)), int(np.sum(data.test_labels))]))
"""


def test_processes_with_two_caches_download_once(tmp_path: Path, serve: Serve, archive10: bytes) -> None:
    server = serve(archive10)
    processes = []
    for cache in ("one", "one", "two"):
        settings = {"source": "cifar10", "root": f"{tmp_path}/root", "cache": f"{tmp_path}/{cache}", "url": server.url}
        command = [sys.executable, "-c", PREPARE, json.dumps(settings)]
        processes.append(
            subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    assert json.loads(outputs[0][0])[:2] == ["cifar10", 10]
    assert server.tries == 1


def test_a_broken_connection_and_a_failing_server_are_tried_again(tmp_path: Path, serve: Serve) -> None:
    server = serve(CONTENT)
    server.errors, server.cuts = [503], [300_000]
    download(server.url, tmp_path / "archive", md5(CONTENT), "fix")
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]
    assert (tmp_path / "archive").read_bytes() == CONTENT
    assert server.tries == 3


@pytest.mark.parametrize(
    ("left", "tries"),
    [(CONTENT, 0), (CONTENT[:500_000], 1), (b"x" * (2 << 20), 1)],
    ids=["whole", "begun", "wrong"],
)
def test_what_a_killed_run_left_is_used_or_overwritten(tmp_path: Path, serve: Serve, left: bytes, tries: int) -> None:
    server = serve(CONTENT)
    (tmp_path / "archive.part").write_bytes(left)
    download(server.url, tmp_path / "archive", md5(CONTENT), "fix")
    assert (tmp_path / "archive").read_bytes() == CONTENT
    assert server.tries == tries


@pytest.mark.parametrize(
    ("errors", "expected_md5", "tries", "message"),
    [
        ([], "0" * 32, 3, f"the content is incomplete or wrong: its MD5 is not {'0' * 32}; fix$"),
        ([500] * 9, md5(CONTENT), 3, "HTTP status 500 Internal Server Error; fix$"),
        ([404] * 9, md5(CONTENT), 1, "HTTP status 404 Not Found; fix$"),
    ],
)
def test_what_cannot_be_had_leaves_nothing(
    tmp_path: Path, serve: Serve, errors: list[int], expected_md5: str, tries: int, message: str
) -> None:
    server = serve(CONTENT)
    server.errors = errors
    with pytest.raises(DownloadError, match=message):
        download(server.url, tmp_path / "archive", expected_md5, "fix")
    assert server.tries == tries
    assert not list(tmp_path.iterdir())


def test_an_address_where_nobody_listens_or_that_is_none_is_not_tried_again(
    tmp_path: Path, closed_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for url, message in ((closed_url, "refused"), ("mirror/archive.tar.gz", "unknown url type")):
        with pytest.raises(DownloadError, match=f"cannot download .*{message}"):
            download(url, tmp_path / "archive", "0" * 32, "fix")
    assert "trying again" not in capsys.readouterr().err


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "BACKOFF_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts; nobody answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/archive"
        with pytest.raises(DownloadError, match="timed out"):
            download(url, tmp_path / "archive", "0" * 32, "fix")
    assert socket.getdefaulttimeout() is None
