"""A parameter of a user's module that DeepSpeed cannot take is named in one line."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from cifar_zero.core.errors import UsageError
from cifar_zero.strategies.deepspeed import ZeROStrategy
from tests.users_code.own_modules import Own


class Scaled(Own):
    """Has a scale without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.usefixtures("own_process_group")
def test_a_parameter_that_deepspeed_cannot_take_is_named():
    trainer = Trainer(accelerator="cpu", devices=1, strategy=ZeROStrategy(2), logger=False)
    with pytest.raises(UsageError, match=r"scale is a scalar.*give it the shape"):
        trainer.fit(Scaled())
