"""Models and transforms in the user's own file are used and kept, and are imported only if the command line names them.
Models of torchvision have their names there. A run starts from their pretrained weights, and reading its checkpoint
needs no network."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from cifar_zero import models
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from cifar_zero.exporting import formats
from cifar_zero.training import starting
from cifar_zero.training.resolve import resolve
from tests.support.helpers import ROOT, assert_ok, last_weights, refused, run_folder_of, run_program, train_all
from tests.users_code.evil import Evil

FILE = ROOT / "tests" / "users_code" / "own_code.py"
MODEL = ["--model", f"{FILE}:Small"]
SMALL = ["--accelerator", "cpu", "--batch_size", "16", "--epochs", "1", "--max_steps", "6", "--model.width", "5"]


@pytest.mark.distributed
def test_it_is_trained_tested_and_exported_where_the_command_line_names_it(small_data: list[str], tmp_path: Path):
    """The run has two ranks, each of which imports the model."""
    flags = [*small_data, *SMALL, *MODEL, "--strategy", "deepspeed_stage_3", "--devices", "2"]
    train_all({tmp_path: flags})
    run = run_folder_of(tmp_path)
    assert (run / FILE.name).read_bytes() == FILE.read_bytes()
    assert run.parent.name == "own_code.py-Small-deepspeed_stage_3"
    refused = run_program("evaluate", str(run))
    assert refused.returncode == 2
    assert f"--model {FILE}:Small" in refused.stderr
    for program in (["evaluate", str(run)], ["export", str(run), "--to", "safetensors"]):
        assert_ok(run_program(*program, *MODEL))


def test_a_run_trains_with_an_own_transform_and_keeps_it(small_data: list[str], tmp_path: Path):
    flags = ["--accelerator", "cpu", "--batch_size", "16", "--max_steps", "4"]
    train_all({tmp_path: [*small_data, *flags, "--augment.transform", f"{FILE}:warmer"]})
    run = run_folder_of(tmp_path)
    assert (run / FILE.name).read_bytes() == FILE.read_bytes()
    assert_ok(run_program("evaluate", str(run)))  # which augments nothing


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--model own_code.py:Small --model.broken true", "(own_code.py, line 34: no good)"),
        ("--model own_code.py:seven_scores", "a score per class: give its last layer 10 outputs"),
        ("--model own_code.py:Nothing", "has no Nothing"),
        ("--model own_code.py:Named", "rename its argument `name`"),
        ("--model nowhere.py:Small", "nowhere.py does not exist"),
        ("--model own_code.py:Small --model.widht 5", "did you mean --model.width?"),
        ("--model torchvision:resnot18", "torchvision has no classifier of this name, did you mean resnet18"),
        ("--model torchvision:vit_b_16", "cannot train on micro-batches of 4 x 32 x 32 pixels"),
        ("--model torchvision:resnet18 --model.kwargs.depth 3", "kwargs do not fit"),
        ("--model torchvision:vit_b_16 --model.kwargs.image_size 15", "Input shape indivisible"),
        ("--model torchvision:resnet18 --model.kwargs.num_classes 7", "returns torch.Size([4, 7]) instead of (4, 10)"),
        ("--model torchvision:resnet18 --batch_size 1", "Expected more than 1 value per channel"),
        (
            "--augment.transform own_code.py:brightest",
            "for an image depends on the other images of the batch",
        ),
        (
            "--augment.transform own_code.py:grey",
            "of the same shape, but returned torch.uint8 (4, 1, 32, 32) for 4 images",
        ),
        (
            "--augment.transform own_code.py:from_0_to_1",
            "ValueError: must return uint8 images of the same shape, but returned torch.float32 (4, 3",
        ),
        ("--augment.transform own_code.py:not_there", "own_code.py has no not_there"),
        ("--augment.transform own_code.py:Small", "own_code.py, line"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(FILE.parent)
    with refused(expected):
        resolve(command_line.parse(["--data.source", "digits", "--accelerator", "cpu", *flags.split()]))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"weights": "DEFAULT"},
        {"pretrained_cfg": {"file": "evil.pth", "custom_load": True}},
        {"block_config": [1, "evil"]},
    ],
)
def test_no_option_names_a_file(kwargs: dict[str, Any]):
    """Options can come from untrusted files, such as the metadata of an export, the record of a checkpoint, or a
    recipe."""
    with pytest.raises(ValueError, match=f"^kwargs.{next(iter(kwargs))} must be a number"):
        models.External({"depths": [2, (2, 6)], "qkv_bias": True, "init_values": None, **kwargs})


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
