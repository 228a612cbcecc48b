"""Activation checkpointing keeps losses, weights and statistics bit for bit, and stores fewer activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from cifar_zero import models
from cifar_zero.core.errors import UsageError
from cifar_zero.models.activation_checkpointing import checkpoint_blocks
from cifar_zero.models.moe import gates
from cifar_zero.planning.activations import ActivationTracker, counted

STEPS = 20


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class Convolutional(nn.Module):
    """Plain layers, and a list of blocks, as in ResNet: batch norm, dropout, in-place activations.

    Args:
        momentum: momentum of the last batch norm; None: the mean over all batches so far.
    """

    def __init__(self, momentum: float | None = None) -> None:
        super().__init__()
        self.features = nn.Sequential(*convolution(3, 8), *convolution(8, 8), nn.MaxPool2d(2), nn.Dropout(0.2))
        last = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.Dropout(0.2))
        self.stage = nn.Sequential(nn.Sequential(*convolution(8, 8)), last)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stage(self.features(x))).mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutional": Convolutional,
    "vit_moe": lambda: models.build("vit_moe", 10, top_k=2, noisy_gate_policy="Jitter"),
}


def trained(make: Callable[[], nn.Module], checkpointed: bool, backend: str = "", steps: int = STEPS) -> list[Tensor]:
    """Trains a model; returns the loss of each step, its final state and the final state of the random generator."""
    torch.manual_seed(0)
    net = make()
    names = [*net.state_dict()]
    if checkpointed:
        checkpoint_blocks(net)
    if backend:
        net.compile(dynamic=False, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    seen: list[Tensor] = []
    for _ in range(steps):
        images, labels = torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,))
        loss = F.cross_entropy(net(images), labels)
        first = [gate.routing for gate in gates(net)]
        for routing in first:
            assert routing is not None
            loss = loss + 0.01 * routing.load_balance_loss
        loss.backward()
        assert all(gate.routing is routing for gate, routing in zip(gates(net), first, strict=True))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    assert [*net.state_dict()] == names
    return [*seen, *net.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("name", NETWORKS)
def test_training_stays_the_same(name: str) -> None:
    steps = 4 if name == "vit_moe" else STEPS
    plain, checkpointed = (trained(NETWORKS[name], switch, steps=steps) for switch in (False, True))
    assert all(map(torch.equal, plain, checkpointed))
    assert not torch.equal(plain[0], plain[1])  # it did train


def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses torch.compile's tracing and partitioning without its code generator, which takes a minute. There is no
    dropout, because another graph draws other random numbers."""
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    make = partial(Convolutional, momentum=0.1)  # one that depends on a value would break the graph
    plain, checkpointed = (trained(make, switch, "aot_eager_decomp_partition", 3) for switch in (False, True))
    assert all(map(torch.equal, plain, checkpointed))


def test_an_evaluation_recomputes_nothing() -> None:
    net = Convolutional()
    checkpoint_blocks(net)
    calls: list[int] = []
    net.stage.get_submodule("0.0").register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        net(torch.zeros(1, 3, 32, 32))
    net(torch.zeros(1, 3, 32, 32)).sum().backward()
    assert len(calls) == 1 + 2


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear has no list of blocks"):
        checkpoint_blocks(nn.Linear(2, 2))


def counted_transformer(checkpointed: bool) -> tuple[int, int]:
    """Returns the bytes between the forward and the backward pass, and the peak."""
    with FakeTensorMode():
        net = models.build("vit_tiny", 10)
        if checkpointed:
            checkpoint_blocks(net)
        with ActivationTracker(net) as held:
            loss = F.cross_entropy(net(torch.randn(16, 3, 32, 32)), torch.zeros(16, dtype=torch.int64))
        assert loss.requires_grad
        return held.now, counted(net, 16, "float32")


def test_memory_of_a_transformer() -> None:
    """The counted bytes are those that hooks see in a real step; shared memory counts once. With checkpointing they are
    about the inputs of 12 blocks, (N, 64, 192) in float32."""
    net = models.build("vit_tiny", 10)
    own = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    seen: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        loss = F.cross_entropy(net(torch.randn(16, 3, 32, 32)), torch.zeros(16, dtype=torch.int64))
    (plain, peak), (checkpointed, lower_peak) = (counted_transformer(switch) for switch in (False, True))
    assert loss.requires_grad
    assert plain == pytest.approx(sum(size for pointer, size in seen.items() if pointer not in own), rel=0.01)
    assert 1 < checkpointed / (12 * 16 * 64 * 192 * 4) < 1.2
    assert lower_peak < peak / 2


def test_offloaded_activations_of_checkpointed_blocks_are_their_inputs() -> None:
    """--activation_offload, here from the CPU to the CPU, keeps the gradients."""
    gradients = []
    for context in (save_on_cpu(), torch.enable_grad()):
        torch.manual_seed(0)
        net = NETWORKS["vit_moe"]()
        checkpoint_blocks(net)
        with context:
            loss = net(torch.ones(2, 3, 32, 32)).sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in net.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *gradients))
