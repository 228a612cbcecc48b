import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributions import Categorical

from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import make_settings
from cifar_zero.models.moe import Routing
from cifar_zero.training.callbacks.curves import Experts
from tests.support.helpers import curve, train_all

NUM_EXPERTS = [2, 4]


class Witness(Callback):
    """Records, at every micro-batch, how each mixture routes its tokens."""

    def __init__(self) -> None:
        self.routings: list[list[Routing]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.routings.append([gate.routing for gate in module.gates])


def test_the_curves_agree_with_the_routings(fit: Callable[..., Any]):
    """The run has ten optimizer steps of two micro-batches of eight images. The capacity of the experts is half of the
    tokens."""
    witness = Witness()
    model = Choice("net_moe", {"num_experts": NUM_EXPERTS, "top_k": 2, "capacity_factor": 0.5})
    settings = make_settings(epochs=2, batch_size=16, accumulate=2, log_interval=4, model=model)
    run = fit(settings, 80, Experts(), witness)
    assert len(witness.routings) == 20
    for number, num_experts in enumerate(NUM_EXPERTS):
        name = f"mixture_{number}"
        dropped = run.points(f"moe/dropped/{name}")
        tokens = [run.points(f"moe/tokens/{name}/expert_{expert}") for expert in range(num_experts)]
        assert list(dropped) == list(run.points("train/loss")) == [4, 8, 10]
        assert min(dropped.values()) > 0  # otherwise this would test nothing
        for first, last in ((0, 4), (4, 8), (8, 10)):
            seen = [of_all[number] for of_all in witness.routings[2 * first : 2 * last]]
            sent_to = torch.cat([routing.experts for routing in seen], dim=1)
            assert dropped[last] == pytest.approx((sent_to == -1).double().mean().item(), rel=1e-6)
            for expert in range(num_experts):
                assert tokens[expert][last] == (sent_to == expert).sum().item() / (last - first)
            losses = torch.stack([routing.load_balance_loss.detach() for routing in seen])
            assert run.points(f"moe/load_balance_loss/{name}")[last] == pytest.approx(losses.mean().item(), rel=1e-6)
            entropy = Categorical(seen[-1].probabilities.double()).entropy().mean() / math.log(num_experts)
            assert run.points(f"moe/gate_entropy/{name}")[last] == pytest.approx(entropy.item(), rel=1e-6)


@pytest.mark.distributed
def test_two_ranks_count_all_tokens(small_data: list[str], tmp_path: Path):
    options = ["--model", "net_moe", "--model.num_experts", "[2]", "--model.capacity_factor", "2"]
    length = ["--batch_size", "32", "--max_steps", "3", "--log_interval", "2", "--data.val_fraction", "0"]
    train_all({tmp_path: [*small_data, *options, *length, "--devices", "2", "--accelerator", "cpu"]})
    first, second = (curve(tmp_path, f"moe/tokens/mixture_0/expert_{expert}") for expert in range(2))
    assert {step: first[step] + second[step] for step in first} == {2: 32, 3: 32}
    assert curve(tmp_path, "moe/dropped/mixture_0") == {2: 0, 3: 0}
    for name in ("load_balance_loss", "gate_entropy"):
        assert curve(tmp_path, f"moe/{name}/mixture_0") == pytest.approx({2: 1, 3: 1}, abs=0.2)
