import subprocess
from pathlib import Path

from cifar_zero.core.hardware import git_commit


def test_the_commit_and_whether_it_is_dirty(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert git_commit(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "one"], check=True)
    subprocess.run([*git, "tag", "-a", "v1", "-m", "v1"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert git_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path) == f"{head}-dirty"
