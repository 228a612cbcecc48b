"""Tests --check_gradients on a correct model and on a model with a wrong derivative."""

import pytest
from torch import Tensor

from cifar_zero.config import command_line
from cifar_zero.models.net import Net
from cifar_zero.training.instead import check_gradients
from cifar_zero.training.resolve import resolve


def test_finds_a_wrong_derivative(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--check_gradients", "--loss", "mse", "--accelerator", "cpu"]
    assert check_gradients(resolve(command_line.parse([*flags, "--model", "net_moe"]))) == 0
    assert "agree" in capsys.readouterr().out
    right = Net.forward

    def with_twice_the_gradient(self: Net, images: Tensor) -> Tensor:
        scores = right(self, images)
        return 2 * scores - scores.detach()

    monkeypatch.setattr(Net, "forward", with_twice_the_gradient)
    assert check_gradients(resolve(command_line.parse(flags))) == 1
    assert "DIFFER: at most 5.0e-01" in " ".join(capsys.readouterr().out.split())
