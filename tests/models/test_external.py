"""Tests models of torchvision, under their names in torchvision."""

from typing import Any

import pytest

from cifar_zero import models
from cifar_zero.config import command_line
from cifar_zero.training.resolve import resolve
from tests.support.helpers import refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("torchvision:resnot18", "torchvision has no classifier of this name, did you mean resnet18"),
        ("torchvision:vit_b_16", "cannot train on micro-batches of 4 x 32 x 32 pixels"),
        ("torchvision:resnet18 --model.kwargs.depth 3", "kwargs do not fit"),
        ("torchvision:vit_b_16 --model.kwargs.image_size 15", "Input shape indivisible"),
        ("torchvision:resnet18 --model.kwargs.num_classes 7", "returns torch.Size([4, 7]) instead of (4, 10)"),
        ("torchvision:resnet18 --batch_size 1", "Expected more than 1 value per channel"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, message: str):
    config = command_line.parse(["--data.source", "digits", "--accelerator", "cpu", "--model", *flags.split()])
    with refused(f"--model {config.recipe.model.name}: ", message):
        resolve(config)


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
