"""Activation checkpointing keeps losses, weights and statistics bit for bit, and stores fewer activations."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from cifar_zero import models
from cifar_zero.models.activation_checkpointing import checkpoint_blocks
from cifar_zero.models.moe import gates
from cifar_zero.planning.activations import ActivationTracker, count_activations

STEPS = 5


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class Convolutional(nn.Module):
    """A model with plain layers and a list of blocks, as in ResNet. They have batch norms, dropout and in-place
    activations. The running statistics of the last batch norm in the list are means over all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*convolution(3, 8), *convolution(8, 8), nn.MaxPool2d(2), nn.Dropout(0.2))
        last = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Dropout(0.2))
        self.stage = nn.Sequential(nn.Sequential(*convolution(8, 8)), last)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stage(self.features(x))).mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutional": Convolutional,
    "vit_moe": lambda: models.build("vit_moe", 10, top_k=2, noisy_gate_policy="Jitter"),
}


def trained(make: Callable[[], nn.Module], checkpointed: bool) -> list[Tensor]:
    """Trains a model and returns the losses, the final state of the model, and the final state of the generator."""
    torch.manual_seed(0)
    net = make()
    names = [*net.state_dict()]
    if checkpointed:
        checkpoint_blocks(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    seen: list[Tensor] = []
    for _ in range(STEPS):
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
def test_training_stays_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(models.LAYOUTS, "tiny", models.Layout(width=32, depth=4, heads=2))
    plain, checkpointed = (trained(NETWORKS[name], switch) for switch in (False, True))
    assert all(map(torch.equal, plain, checkpointed))
    assert not torch.equal(plain[0], plain[1])  # it did train


def test_layers_that_are_replaced_later_are_used():
    net = Convolutional()
    checkpoint_blocks(net)
    images = torch.randn(2, 3, 32, 32)
    net(images)
    expected = copy.deepcopy(net).eval()(images)
    assert torch.equal(nn.SyncBatchNorm.convert_sync_batchnorm(net).eval()(images), expected)


def counted_transformer(checkpointed: bool) -> tuple[int, int]:
    """Returns the bytes between the forward and the backward pass, and the peak."""
    with FakeTensorMode():
        net = models.build("vit_tiny", 10)
        if checkpointed:
            checkpoint_blocks(net)
        with ActivationTracker(net) as tracker:
            loss = F.cross_entropy(net(torch.randn(16, 3, 32, 32)), torch.zeros(16, dtype=torch.int64))
        assert loss.requires_grad
        return tracker.now, count_activations(net, 16, "float32")


def test_memory_of_a_transformer():
    """The counted bytes equal the bytes that hooks see in a real step, where shared memory counts once. With
    checkpointing they are about the inputs of 12 blocks, each (N, 64, 192) in float32."""
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
