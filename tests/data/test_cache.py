"""The decoded cache survives killed writers and damage, and follows its inputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cifar_zero import data
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core.errors import RunError, UsageError

KILLED_WRITER = """
import sys, time
from pathlib import Path
from cifar_zero.data import cache

def build(directory):
    cache.allocate(directory, "train", 1000)
    print("writing", flush=True)
    time.sleep(3600)

cache.ensure(Path(sys.argv[1]), "synthetic", ("one",), "seed 0", build)
"""


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig("synthetic", root=str(tmp_path), synthetic_size=1000)


def image_file(config: DataConfig) -> Path:
    return Path(config.root) / ".cifar-zero" / "synthetic-1000" / "train_images.npy"


def test_a_killed_writer_leaves_nothing_in_the_way(config: DataConfig):
    directory = image_file(config).parent
    repository = Path(data.__file__).parents[2]
    command = [sys.executable, "-c", KILLED_WRITER, str(directory)]
    with subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
    assert directory.with_name("synthetic-1000.tmp").exists()
    assert not directory.exists()
    assert len(data.load(config, data.prepare(config)).train_images) == 1000
    assert sorted(path.name for path in directory.parent.iterdir()) == ["synthetic-1000", "synthetic-1000.lock"]


def test_a_damaged_cache_is_rebuilt(config: DataConfig):
    data.prepare(config)
    path = image_file(config)
    whole = path.read_bytes()
    lost_block = whole[:400_000] + bytes(100_000) + whole[500_000:]
    torn_header = whole.replace(b"3), }", "3¨, ".encode("latin1"), 1)
    other_pixel = whole[:400_001] + bytes([whole[400_001] ^ 1]) + whole[400_002:]
    for damaged in (lost_block, torn_header, other_pixel, b"", None):
        path.write_bytes(damaged) if damaged is not None else path.unlink()
        data.prepare(config)
        assert path.read_bytes() == whole
    meta = path.with_name("meta.json")
    written = meta.read_text()
    for key, value in {"classes": json.loads(written)["classes"][::-1], "source": "digits", "more": 1}.items():
        meta.write_text(json.dumps({**json.loads(written), key: value}))
        data.prepare(config)
        assert meta.read_text() == written, key
    os.truncate(path, len(whole) // 2)
    with pytest.raises(RunError, match="no decoded images"):
        data.load(config, "synthetic")


def test_another_users_cache_is_named(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    data.prepare(config)
    directory = image_file(config).parent
    if os.geteuid() == 0:
        os.chown(directory, 4321, -1)
    owner = directory.stat().st_uid
    for user in (owner + 1, owner):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        capsys.readouterr()
        data.prepare(config)
        said = capsys.readouterr().err
        assert (f"{directory} belongs to user {owner}, who can change its images" in said) == (user != owner)


@pytest.mark.parametrize("name", ["synthetic-1000", "synthetic-1000.tmp"])
def test_a_folder_of_the_users_is_not_replaced(config: DataConfig, name: str):
    photo = image_file(config).parents[1] / name / "train" / "cat" / "photo.png"
    photo.parent.mkdir(parents=True)
    photo.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"other files \(train\): choose another directory with --data\.cache DIR"):
        data.prepare(config)
    assert photo.read_bytes() == b"mine"
