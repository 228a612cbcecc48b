"""A checkpoint does not decide which server evaluate asks, and which folders it reads and makes."""

from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.config.arguments import read_arguments
from cifar_zero.config.recipe import DataConfig
from cifar_zero.core.errors import UsageError
from cifar_zero.training.evaluate import run_of


def checkpoint_of(folder: Path, *flags: str) -> Path:
    """Writes the recipe of a run, and returns the path of its checkpoint, which does not exist."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(command_line.dump(command_line.parse(flags)))
    return folder / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(("source", "tested"), [("cifar10", "cifar10"), ("digits", "digits"), ("auto", "cifar10")])
def test_the_server_and_the_folders_of_a_checkpoint_are_not_used(
    source: str, tested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With auto, a model of CIFAR-10 would be tested on digits where CIFAR-10 is not available."""
    root, cache = f"{tmp_path}/root", f"{tmp_path}/cache"
    locations = ["--data.url", "http://127.0.0.1:9/a", "--data.cache", cache, "--data.root", root]
    checkpoint = checkpoint_of(tmp_path / "run", "--data.source", source, *locations)
    data = run_of(checkpoint, read_arguments(["--accelerator", "cpu"])).data
    assert (data.url, data.cache, data.root) == (DataConfig.url, DataConfig.cache, DataConfig.root)
    assert data.source == tested
    assert ("--data.root names another folder" in capsys.readouterr().err) == (tested == "cifar10")
    data = run_of(checkpoint, read_arguments(["--data.root", "mine", "--data.url", "http://mine"])).data
    assert (data.url, data.root) == ("http://mine", "mine")


def test_the_users_own_images_are_named_on_the_command_line(tmp_path: Path):
    checkpoint = checkpoint_of(tmp_path / "run", "--data.source", "folder", "--data.root", "/home/other")
    with pytest.raises(UsageError, match=r"--data\.root DIR is missing: the run's images were in /home/other"):
        run_of(checkpoint, read_arguments([]))
