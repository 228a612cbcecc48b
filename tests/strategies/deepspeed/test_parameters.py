"""Parameters of a user's module that DeepSpeed cannot take as they are: they are laid out for it, or named in one
line."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from cifar_zero.core.errors import UsageError
from cifar_zero.strategies.deepspeed import ZeROStrategy
from tests.users_code.own_modules import Own, images

pytestmark = pytest.mark.usefixtures("own_process_group")


class Scaled(Own):
    """A module whose scale has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Transposed(Own):
    """A module with a parameter that is a transposed copy of another one, so it is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 8), nn.Linear(24, 10)
        self.second = nn.Parameter(self.first.weight.t().detach().clone())
        assert not self.second.is_contiguous()

    def net(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.last(self.first(x) @ self.second.t())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images(), 4)


class TiedByMemory(Own):
    """A module with two parameters that share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = nn.Parameter(self.first.weight.detach().t())


class PartlyUsed(Own):
    """A module in which the first and the last parameter are not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.net, self.last = nn.Linear(2, 3), nn.Linear(24, 10), nn.Linear(3, 2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images(), 4)


def fit(module: Own, strategy: ZeROStrategy | str, steps: int = 3, resume: Path | None = None) -> Trainer:
    options: Any = {"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False}
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, **options)
    trainer.fit(module, ckpt_path=resume)
    return trainer


def test_a_start_calls_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """DeepSpeed would try which of its operators could be compiled."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\ntouch $0-was-called\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    fit(Transposed(), ZeROStrategy(2))
    assert [path.name for path in tmp_path.iterdir()] == ["cc"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_that_is_not_contiguous_trains(stage: int):
    plain, sharded = Transposed(), Transposed()
    fit(plain, "auto")
    fit(sharded, ZeROStrategy(stage))
    assert_same_weights(plain, sharded, stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_without_state_of_an_unused_parameter_resumes(stage: int, tmp_path: Path):
    """torch's optimizers have no state for such a parameter. There is no decay, because under DeepSpeed such a
    parameter decays too."""
    plain, sharded = PartlyUsed(), PartlyUsed()
    for module in (plain, sharded):
        module.configure_optimizers = lambda module=module: torch.optim.Adam(module.parameters(), lr=0.01)
    fit(plain, "auto", 3).save_checkpoint(tmp_path / "begun.ckpt")
    fit(sharded, ZeROStrategy(stage), 5, tmp_path / "begun.ckpt")
    fit(plain, "auto", 5, tmp_path / "begun.ckpt")
    assert_same_weights(plain, sharded, stage)


def assert_same_weights(plain: Own, sharded: Own, stage: int) -> None:
    with GatheredParameters([*sharded.parameters()], enabled=stage == 3):
        for expected, parameter in zip(plain.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), expected.detach())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Scaled, "scale is a scalar, and DeepSpeed cannot broadcast it: give it the shape"),
        (TiedByMemory, "second and first.weight share memory, and DeepSpeed would separate them: "),
    ],
)
def test_a_parameter_that_deepspeed_cannot_take_is_named(module: type[Own], said: str):
    with pytest.raises(UsageError, match=said):
        fit(module(), ZeROStrategy(2))
