"""A run starts from torchvision's pretrained weights, and reading its checkpoint needs no network."""

from pathlib import Path

import pytest
import torch
import torchvision

from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.exporting import formats
from cifar_zero.training import starting
from cifar_zero.training.resolve import resolve
from tests.support.helpers import last_weights, run_folder_of, run_program
from tests.users_code.evil import Evil

NAME = "shufflenet_v2_x0_5"
FLAGS = ["--model", f"torchvision:{NAME}", "--model.weights", "DEFAULT", "--data.normalize", "imagenet"]
OFFLINE = {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": ""}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Puts weights into torch's cache, in the file that torchvision would download, and returns them."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for key, value in OFFLINE.items():
        monkeypatch.setenv(key, value)
    url = torchvision.models.get_model_weights(NAME)["DEFAULT"].url
    weights = torchvision.models.get_model(NAME).state_dict()
    (tmp_path / "torch/hub/checkpoints").mkdir(parents=True)
    torch.save(weights, tmp_path / "torch/hub/checkpoints" / Path(url).name)
    return weights


def test_a_run_starts_from_them_and_its_checkpoint_needs_no_download(
    cached: dict[str, torch.Tensor], small_data: list[str], tmp_path: Path
):
    """The run trains the head and the last batch norm. After the validation in mid-epoch, Lightning sets the model back
    to training mode, in which the other batch norms keep their statistics."""
    flags = [*FLAGS, *small_data, "--accelerator", "cpu", "--max_steps", "2", "--batch_size", "8"]
    flags += ["--trainable", "fc.*", "conv5.1.*", "--optimizer.lr", "1", "--trainer.val_check_interval", "1"]
    flags += ["--out", str(tmp_path / "runs"), "--logger", "none"]
    done = run_program("train.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "loaded 336 of 338 tensors; initialised: fc.weight (10x1024), fc.bias (10); not used: fc.w" in done.stderr
    folder = run_folder_of(tmp_path / "runs")
    actual = last_weights(folder)
    for name, value in cached.items():
        assert torch.equal(actual[name], value) != name.startswith(("fc.", "conv5.1.")), name
    (file,) = (tmp_path / "torch").rglob("*.pth")
    file.unlink()
    assert len(formats.load_classifier(str(folder)).classes) == 10
    config = command_line.parse(["--config", str(folder / "config.yaml"), "--resume", str(folder)])
    assert starting.pretrained_weights(resolve(config)) is None
    with pytest.raises(UsageError) as error:
        starting.pretrained_weights(resolve(command_line.parse(flags)))
    line = str(error.value)
    assert f"--model.weights DEFAULT: cannot load https://download.pytorch.org/models/{file.name} (" in line
    assert f"put this file into {file.parent}, or start from another one with --weights FILE" in line
    assert "\n" not in line


def test_weights_that_cannot_be_used_are_refused(cached: dict[str, torch.Tensor], tmp_path: Path):
    """A file in the cache could run code."""
    (file,) = (tmp_path / "torch").rglob("*.pth")
    torch.save({"evil": Evil(tmp_path / "proof")}, file)
    for flags, message in (([], r"DEFAULT: cannot load"), (["--model.weights", "DEFOLT"], r"DEFOLT: did you mean DEF")):
        with pytest.raises(UsageError, match=rf"^--model\.weights {message}"):
            starting.pretrained_weights(resolve(command_line.parse([*FLAGS, "--data.source", "digits", *flags])))
    assert not (tmp_path / "proof").exists()
