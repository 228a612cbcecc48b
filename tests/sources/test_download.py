"""The archive comes over the network once, whole and checked, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sources
from config import DataConfig
from errors import RunError
from sources.download import DownloadError, download
from tests.sources.archives import ArchiveServer, md5

Serve = Callable[[bytes], ArchiveServer]
CONTENT = bytes(range(256)) * 4096  # 1 MiB: more than one chunk
REPOSITORY = Path(sources.__file__).parents[1]

PREPARE = """
import json, sys
import numpy as np
import sources
from config import DataConfig
config = DataConfig(**json.loads(sys.argv[1]))
name = sources.prepare(config)
data = sources.load(config, name)
print(json.dumps([name, len(data.classes), int(np.sum(data.train_images)), int(np.sum(data.test_labels))]))
"""


def test_four_processes_at_once_download_once(tmp_path: Path, serve: Serve, archive10: bytes) -> None:
    server = serve(archive10)
    settings = {"source": "cifar10", "root": str(tmp_path / "root"), "url": server.url, "md5": md5(archive10)}
    command = [sys.executable, "-c", PREPARE, json.dumps(settings)]
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    assert json.loads(outputs[0][0])[:2] == ["cifar10", 10]
    assert server.ranges_asked == [None]


@pytest.mark.parametrize("accepts_ranges", [True, False])
def test_a_cut_connection_is_mended(tmp_path: Path, serve: Serve, accepts_ranges: bool) -> None:
    server = serve(CONTENT)
    server.accepts_ranges = accepts_ranges
    server.cuts = [300_000]
    download(server.url, tmp_path / "archive", md5(CONTENT), "mend")
    assert (tmp_path / "archive").read_bytes() == CONTENT
    assert server.ranges_asked == [None, "bytes=300000-"]


@pytest.mark.parametrize("left", [CONTENT[:500_000], CONTENT, b"x" * 500_000, b"x" * (2 << 20)])
def test_what_a_killed_run_left_is_resumed_or_thrown_away(tmp_path: Path, serve: Serve, left: bytes) -> None:
    (tmp_path / "archive.part").write_bytes(left)
    download(serve(CONTENT).url, tmp_path / "archive", md5(CONTENT), "mend")
    assert (tmp_path / "archive").read_bytes() == CONTENT
    assert not (tmp_path / "archive.part").exists()


def test_a_server_that_always_cuts_promotes_nothing(tmp_path: Path, serve: Serve, archive10: bytes) -> None:
    server = serve(archive10)
    server.accepts_ranges = False
    server.cuts = [1000] * 100
    config = DataConfig("cifar10", root=str(tmp_path), url=server.url, md5=md5(archive10))
    with pytest.raises(RunError, match=r"cut after 1,000 of .* --data\.url"):
        sources.prepare(config)
    assert len(server.ranges_asked) == 3
    assert not (tmp_path / "cifar-10-python.tar.gz").exists()
    assert not list(tmp_path.rglob("*.npy"))


def test_a_wrong_checksum_is_never_promoted(tmp_path: Path, serve: Serve) -> None:
    server = serve(CONTENT)
    with pytest.raises(DownloadError, match=f"its MD5 is {md5(CONTENT)}, expected {'0' * 32}; mend"):
        download(server.url, tmp_path / "archive", "0" * 32, "mend")
    assert server.ranges_asked == [None, None]
    assert not list(tmp_path.iterdir())


def test_an_address_where_nobody_listens_is_not_tried_again(
    tmp_path: Path, closed_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DownloadError, match=r"cannot download .* refused"):
        download(closed_url, tmp_path / "archive", "0" * 32, "mend")
    assert "trying again" not in capsys.readouterr().err
