"""The harness of airbench94_muon.py with a small program of the same shape: the file itself is not in this tree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import airbench
from cifar_zero.core.errors import UsageError

PROGRAM = """
import os
from math import ceil
import torch
import torch.nn.functional as F
from torch import nn
from cifar_zero import models

@torch.compile
def same(x):
    return x.bfloat16()

class CifarLoader:
    def __init__(self, train, batch_size):
        data_path = "nowhere"
        if not os.path.exists(data_path):
            raise FileNotFoundError
        data = torch.load(data_path, map_location=torch.device("cuda"))
        self.images, self.labels = data["images"].half().permute(0, 3, 1, 2) / 127.5 - 1, data["labels"]
        self.epoch, self.batch_size = 0, batch_size

    def __iter__(self):
        self.epoch += 1
        return zip(self.images.split(self.batch_size), self.labels.split(self.batch_size))

class CifarNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = dict(block1=64, block2=256, block3=256)
        self.net = models.build("speednet", 10, width=widths["block1"] / 64)
        self.net.head.register_forward_hook(lambda head, x, scores: self.scaled(x[0], scores))

    def scaled(self, x, scores):
        assert (scores / x.size(-1)
            ).shape == scores.shape
        return scores

    def reset(self):
        pass

    def init_whiten(self, images):
        pass

    def forward(self, x):
        return self.net(x)

def main(run, model):
    batch_size = 2000
    starter, ender = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    starter.record()
    loader, test = CifarLoader(True, batch_size), CifarLoader(False, batch_size)
    model.reset()
    model.init_whiten(loader.images)
    biases = [model.net.whiten.bias]
    step, steps = 0, ceil(8 * (len(loader.labels) // batch_size))
    assert ceil(3 * steps) > 0
    for epoch in range(2):
        for inputs, labels in loader:
            F.cross_entropy(same(model(inputs)), labels, label_smoothing=0.2, reduction="sum").backward()
    ender.record()
    torch.cuda.synchronize()
    assert starter.elapsed_time(ender) > 0
    return (model.eval()(test.images).argmax(1) == test.labels).float().mean().item()

if __name__ == "__main__":
    main(0, CifarNet().cuda())
"""


def printed_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    monkeypatch.setattr(sys, "argv", ["airbench", *flags])
    assert airbench.main() == 0
    return capsys.readouterr().out


def test_compares_a_program_with_ours(
    small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With our weights and batches the loss of the first step is ours; the made-up program does not train."""
    (tmp_path / "program.py").write_text(PROGRAM)
    small = ["--width", "0.0625", "--epochs", "2", "--batch_size", "64", "--trainer.limit_test_batches", "1"]
    flags = [str(tmp_path / "program.py"), *small, *small_data]
    alone = printed_by(monkeypatch, capsys, *flags, "--runs", "1")
    assert re.fullmatch(r"seed 0: theirs [\d.]+ %\ntheirs [\d.]+ %\n", alone)
    both = printed_by(monkeypatch, capsys, *flags, "--runs", "2", "--ours")
    assert re.search(r"seed 1: theirs [\d.]+ %, ours [\d.]+ %\n.*\nours [\d.]+ ± [\d.]+ %\ndifference", both)
    assert re.search(r"difference [+-][\d.]+ ± [\d.]+ \(standard error\)", both)
    same = printed_by(monkeypatch, capsys, *flags, "--runs", "1", "--same")
    differences = dict(re.findall(r"step (\d+): .* relative difference (\S+)", same))
    assert float(differences["1"]) < 1e-5 < float(differences["20"])


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (None, [], "cannot read .*nowhere.py: No such file"),
        ("print(1)", [], "nowhere.py is not airbench94_muon.py, or another version: it has no @torch.compile"),
        ("", ["--runs", "0"], "--runs must be at least 1, not 0"),
    ],
)
def test_mistakes_are_one_clear_line(
    content: str | None,
    flags: list[str],
    message: str,
    small_data: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if content is not None:
        (tmp_path / "nowhere.py").write_text(content)
    monkeypatch.setattr(sys, "argv", ["airbench", str(tmp_path / "nowhere.py"), *flags, *small_data])
    with pytest.raises(UsageError, match=message):
        airbench.main()
