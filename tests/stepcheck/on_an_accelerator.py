"""An audit of a training on a device that fails as a GPU does (tests/support/accelerator.py)."""

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepcheck import Replay, audit
from stepcheck.strategies import ZERO
from tests.support import accelerator
from tests.support.suite import WHOLE, run_python

OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "AdamW on the device": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01),
}
STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(convolution, nn.Linear(144, 64), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 5))


def loss_of(batch: tuple[Tensor, Tensor], net: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1]) / 2


def train(optimizer: Any, clip: float = 0.0, audited: bool = True, replays: bool = False) -> tuple[Any, list[int]]:
    """Returns the verdict, and how often the host waited in each step."""
    device = accelerator.install()
    net = model().to(device)
    replay = Replay(copy.deepcopy(net)) if replays else None
    built, waits = optimizer(net.parameters()), []
    started = audit(net, built, on_fault="warn", replay=replay) if audited else None
    for _ in range(STEPS):
        accelerator.waits.clear()
        for _ in range(2):
            batch = torch.randn(8, 3, 8, 8).to(device), torch.randint(0, 5, (8,)).to(device)
            if replay:
                replay.micro_batch(partial(loss_of, batch))
            loss = loss_of(batch, net)
            if replay:
                replay.loss(loss)
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        built.step()
        built.zero_grad()
        waits.append(accelerator.waits.total())
    return started and started.verdict, waits


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_audit_makes_the_host_wait_once_in_a_step(name: str, clip: float):
    assert train(OPTIMIZERS[name], clip, audited=False)[1] == [0] * STEPS
    verdict, waits = train(OPTIMIZERS[name], clip)
    assert verdict.outcome == "agrees", str(verdict)
    assert waits == [1] * STEPS


def test_a_replay_computes_on_the_device():
    verdict, _ = train(OPTIMIZERS["SGD"], replays=True)
    assert verdict.outcome == "agrees", str(verdict)
    assert verdict.identical == verdict.replayed == STEPS


def test_the_device_refuses_tensors_of_another():
    device = accelerator.install()
    ones = torch.ones(3, device=device)
    assert (ones * torch.tensor(2.0)).sum().item() == 6
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        ones.add(torch.ones(3))


def test_deepspeed_is_audited_on_the_device():
    """Offload moves optimizers to the CPU, where a wrong device shows."""
    strategies = [*ZERO] if WHOLE else ["deepspeed_stage_2", "deepspeed_stage_3_offload"]
    done = run_python("-m", "tests.stepcheck.deepspeed_on_accelerator", *strategies)
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [line[0] for line in lines] == strategies
    assert all(line[1:3] == ["agrees", 2] for line in lines), lines
