"""Executes the code of docs/loops.md on one CPU rank: the three loops train the same model."""

import os
from typing import Any

import deepspeed
import lightning.pytorch as lightning
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, TensorDataset

from cifar_zero.models.net import Net
from stepcheck.engines.deepspeed import compile_no_collective
from stepcheck.lightning.strategy import CPUDeepSpeedStrategy
from tests.commands.test_readme import blocks
from tests.support.helpers import ROOT

PAGE = ROOT / "docs" / "loops.md"
PLAIN, ENGINE, LIGHTNING, *_ = blocks(PAGE, "python")
IMAGES = 16
ADAM = {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True, "adam_w_mode": False}}


def images(*_: object, **__: object) -> TensorDataset:
    """Stands for CIFAR10: one batch of random images."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(IMAGES, 3, 32, 32, generator=random)
    return TensorDataset(values, torch.randint(10, (IMAGES,), generator=random))


def net() -> Net:
    torch.manual_seed(0)
    return Net(10)


def trainer(strategy: str, devices: int) -> lightning.Trainer:
    """Returns the page's Trainer, for one epoch on one CPU rank."""
    assert (strategy, devices) == ("deepspeed_stage_2", 2)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(
        strategy=CPUDeepSpeedStrategy(stage=2), accelerator="cpu", devices=1, max_epochs=1, **quiet
    )


@pytest.mark.usefixtures("own_process_group")
def test_the_three_loops_train_the_same_model(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    compile_no_collective()
    names: dict[str, Any] = {
        **{"torch": torch, "deepspeed": deepspeed, "dist": dist, "os": os},
        **{"Net": net, "CIFAR10": images, "DataLoader": DataLoader, "Trainer": trainer},
        **{"LightningModule": lightning.LightningModule, "LightningDataModule": lightning.LightningDataModule},
        **{"cross_entropy": torch.nn.functional.cross_entropy, "get_accelerator": get_accelerator},
        **{"device": "cpu", "transform": None, "ds_config": {"train_batch_size": IMAGES, "optimizer": ADAM}},
        **{"loader": DataLoader(images(), IMAGES), "test_loader": DataLoader(images(), IMAGES)},
    }
    trained: list[torch.Tensor] = []
    for block in (PLAIN, ENGINE, LIGHTNING):
        exec(compile(block, str(PAGE), "exec"), names)
        model = names["trainer"].lightning_module.net if block == LIGHTNING else names["net"]
        trained.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    start = torch.nn.utils.parameters_to_vector(net().parameters())
    for weights in trained:
        assert (weights - start).abs().max() > 9e-4  # Adam's first step moves weights by the learning rate
        torch.testing.assert_close(weights, trained[0], atol=1e-4, rtol=0)
    assert 0 <= names["correct"] <= IMAGES
    orders = [torch.cat([labels for _, labels in names["loader"]]) for _ in range(2)]
    assert torch.equal(*orders), "DeepSpeed sets the sampler's epoch: mend docs/loops.md"
    names["loader"].data_sampler.set_epoch(1)
    assert not torch.equal(orders[0], torch.cat([labels for _, labels in names["loader"]]))
