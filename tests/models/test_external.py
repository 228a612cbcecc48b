"""Models of torchvision, by their names there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from cifar_zero import models
from cifar_zero.config import command_line
from cifar_zero.config.recipe import Choice
from cifar_zero.core.errors import UsageError
from cifar_zero.training.resolve import resolve
from tests.support.helpers import parameter_count, run_program


def test_is_torchvisions_own():
    torch.manual_seed(0)
    net = models.build("torchvision:squeezenet1_1", 7, kwargs={"dropout": 0.1})
    torch.manual_seed(0)
    expected = torchvision.models.squeezenet1_1(num_classes=7, dropout=0.1)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in expected.state_dict().items())
    assert parameter_count(Choice("torchvision:squeezenet1_1"), 7) == sum(p.numel() for p in net.parameters())


def test_images_are_scaled_for_it():
    net = models.build("torchvision:alexnet", 3, image_size=64)
    sizes = []
    net.get_submodule("net").register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape))
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert sizes == [(2, 3, 64, 64)]


def test_counts_a_model_whose_shapes_depend_on_values():
    """torchvision computes the widths of a RegNet with tensors, which have no values on the meta device."""
    net = torchvision.models.regnet_y_400mf(num_classes=10)
    assert parameter_count(Choice("torchvision:regnet_y_400mf"), 10) == sum(p.numel() for p in net.parameters())


def test_an_external_model_works_in_a_recipe(tmp_path: Path):
    flags = ["--model", "torchvision:resnet18", "--model.kwargs.zero_init_residual", "true", "--model.image_size", "64"]
    config = command_line.parse(flags)
    assert config.recipe.model.options == {"kwargs": {"zero_init_residual": True}, "image_size": 64, "weights": ""}
    assert config.run_name == "torchvision-resnet18-baseline"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(command_line.dump(config))
    assert command_line.parse(["--config", str(recipe)]) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("torchvision:resnot18", "torchvision has no classifier of that name, did you mean resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", "torchvision has no classifier of that name"),
        ("torchvision:vit_b_16", "cannot train on micro-batches of 4 x 32 x 32 pixels"),
        ("torchvision:resnet18 --model.kwargs.depth 3", "kwargs do not fit"),
        ("torchvision:resnet18 --model.kwargs.pretrained true", "kwargs do not fit"),
        ("torchvision:vit_b_16 --model.kwargs.image_size 15", "Input shape indivisible"),
        ("torchvision:resnet18 --model.kwargs.num_classes 7", "returns torch.Size([4, 7]) instead of (4, 10)"),
        ("torchvision:resnet50 --batch_size 1", "Expected more than 1 value per channel"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    config = command_line.parse(["--data.source", "digits", "--accelerator", "cpu", "--model", *flags.split()])
    with pytest.raises(UsageError) as error:
        resolve(config)
    assert str(error.value).startswith(f"--model {config.recipe.model.name}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"weights": "DEFAULT"},
        {"checkpoint_path": "evil.pth"},
        {"cache_dir": "/tmp"},
        {"pretrained_cfg": {"file": "evil.pth", "custom_load": True}},
        {"block_config": [1, "evil"]},
    ],
)
def test_no_option_names_a_file(kwargs: dict[str, Any]):
    """Options can come from untrusted files: metadata of an export, a checkpoint's record, a recipe."""
    with pytest.raises(ValueError, match=f"^kwargs.{next(iter(kwargs))} must be a number"):
        models.build("torchvision:resnet18", 10, kwargs=kwargs)


def test_numbers_and_lists_are_accepted():
    kwargs = {"depths": [2, (2, 6)], "qkv_bias": True, "drop_rate": 0.1, "init_values": None}
    assert models.External(kwargs).kwargs == kwargs


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("resnet18 --trainer.sync_batchnorm true", "--trainer.sync_batchnorm is for ddp on GPUs"),
        (
            "net_moe --model.ep_size 2 --devices 2 --strategy deepspeed_stage_2 --init he",
            "--init he initialises the experts",
        ),
    ],
)
def test_batch_norm_and_init_are_refused_where_they_cannot_work(flags: str, message: str):
    config = command_line.parse(["--data.source", "digits", "--accelerator", "cpu", "--model", *flags.split()])
    with pytest.raises(UsageError, match=message):
        resolve(config)


def test_help_and_usage_errors_need_no_torch():
    done = run_program("-X", "importtime", "train.py", "--model", "torchvision:resnet18", "--help", "all")
    assert done.returncode == 0
    assert "--model.image_size" in done.stdout
    assert not {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()} & {"torch", "torchvision"}
