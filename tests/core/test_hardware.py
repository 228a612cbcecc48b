import subprocess
from pathlib import Path

import pytest

from cifar_zero.core import hardware
from cifar_zero.core.hardware import git_commit


def test_the_commit_and_whether_it_is_dirty(tmp_path: Path):
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert git_commit(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert git_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == f"{head}-dirty"


def test_a_container_may_have_less_memory_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit = {"memory.max": "3000000\n", "memory.current": "2500000\n", "memory.stat": "anon 1\ninactive_file 1000000\n"}
    for name, text in limit.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    assert hardware.free_memory_bytes() == 1_500_000
