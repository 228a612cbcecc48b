"""Tests --check_gradients on a correct model and on a model with a wrong derivative."""

import pytest
import torch

from cifar_zero.config import command_line
from cifar_zero.models.net import Net
from cifar_zero.training.instead import check_gradients
from cifar_zero.training.resolve import resolve


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return 2 * input

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def test_finds_a_wrong_derivative(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--check_gradients", "--loss", "mse", "--accelerator", "cpu"]
    assert check_gradients(resolve(command_line.parse([*flags, "--model", "net_moe"]))) == 0
    assert "agree" in capsys.readouterr().out
    right = Net.forward
    monkeypatch.setattr(Net, "forward", lambda self, images: Wrong.apply(right(self, images)))
    assert check_gradients(resolve(command_line.parse(flags))) == 1
    assert "DIFFER: at most 1.0e+00" in " ".join(capsys.readouterr().out.split())
