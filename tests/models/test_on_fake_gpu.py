"""Every model and optimizer on a GPU that torch only imagines: a tensor on another device and a step that waits for a
value fail here as on a real one, whose backward pass and fused SGD have no imagined form (torch 2.15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.models import MODELS
from cifar_zero.optimizers import OPTIMIZERS, Adam, Adam8bit
from cifar_zero.optimizers.groups import parameter_groups

GPU = torch.device("cuda", 0)
BATCH = 8


def loss_of(module: CIFARModule) -> Tensor:
    """Returns the loss of a training step, as Lightning runs it: only the building has a default device."""
    images = torch.empty(BATCH, 3, 32, 32, dtype=torch.uint8, device=GPU)
    return module.training_step((images, torch.empty(BATCH, dtype=torch.int64, device=GPU)), 0)


def module_of(*flags: str) -> CIFARModule:
    """Returns the module of a run, without its model: its metrics are made of real tensors, which cannot be faked."""
    return CIFARModule(command_line.parse([*flags]), num_classes=10)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_on_one_device_without_waiting_for_it(model: str):
    module = module_of("--model", model)
    with FakeTensorMode():
        with GPU:
            module.configure_model()
        module.on_train_start()
        assert module.net is not None
        assert loss_of(module).device == GPU
        assert {tensor.device for tensor in (*module.net.parameters(), *module.net.buffers())} == {GPU}
        parameters = dict(module.named_parameters())
        one_of_each_shape = {parameter.shape: parameter for parameter in parameters.values()}
        for parameter in one_of_each_shape.values():  # the 41 blocks of vit_13b would take their time
            parameter.grad = torch.empty_like(parameter)
        for options in (make() for make in OPTIMIZERS.values() if make is not Adam8bit):  # bitsandbytes' own kernels
            for implementation in ("torch", "torch_fused") if isinstance(options, Adam) else ("torch",):
                options.build(parameter_groups(options, parameters), implementation).step()


class Reads(nn.Linear):
    """A layer whose pass depends on a value."""

    def forward(self, input: Tensor) -> Tensor:
        scores = super().forward(input)
        return scores if scores.mean() > 0 else -scores


class Mixes(nn.Linear):
    """A layer that adds what it makes on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.ones(self.out_features)


@pytest.mark.parametrize(
    ("layer", "error", "said"),
    [(Reads, DataDependentOutputException, "_local_scalar_dense"), (Mixes, RuntimeError, "at least two devices")],
)
def test_a_value_that_is_read_and_a_second_device_are_found(layer: Any, error: type[Exception], said: str):
    module = module_of("--model", "mlp")
    with FakeTensorMode():
        with GPU:
            module.net = nn.Sequential(nn.Flatten(), layer(3 * 32 * 32, 10))
        with pytest.raises(error, match=said):
            loss_of(module)
