"""Runs every model and optimizer on a fake GPU (torch's FakeTensorMode). A tensor on another device, or a step that
waits for a value, fails as on a real GPU. The backward pass and fused SGD have no fake form in torch 2.15."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cifar_module import CIFARModule
from cifar_zero import models
from cifar_zero.config import command_line
from cifar_zero.optimizers import OPTIMIZERS, Adam
from cifar_zero.optimizers.groups import parameter_groups

GPU = torch.device("cuda", 0)


def is_channels_last(images: torch.Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)


LARGE = {"resnet34", "resnet50", "vit_small", "vit_base", "vit_large", "vit_1b", "vit_13b"}
"""Models that run the same code as a smaller model."""


@pytest.mark.parametrize("model", sorted({*models.MODELS} - LARGE))
def test_every_model_trains_on_one_device_without_waiting_for_it(model: str):
    module = CIFARModule(command_line.parse(["--model", model]), num_classes=10)  # metrics cannot be faked
    with FakeTensorMode():
        with GPU:  # as in Lightning: only the building has a default device
            module.configure_model()
        module.on_train_start()
        assert module.net is not None
        formats: list[bool] = []
        module.net.register_forward_pre_hook(lambda _, inputs: formats.append(is_channels_last(inputs[0])))
        images = torch.empty(8, 3, 32, 32, dtype=torch.uint8, device=GPU)
        assert module.training_step((images, torch.empty(8, dtype=torch.int64, device=GPU)), 0).device == GPU
        assert formats == [True]
        assert {tensor.device for tensor in (*module.net.parameters(), *module.net.buffers())} == {GPU}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_on_one_device_without_waiting_for_it(name: str):
    options = OPTIMIZERS[name]()
    with FakeTensorMode():
        with GPU:
            parameters = dict(models.build("net", 10).named_parameters())
        for parameter in parameters.values():
            parameter.grad = torch.empty_like(parameter)
        for implementation in ("torch", "torch_fused") if isinstance(options, Adam) else ("torch",):
            optimizer = options.build(parameter_groups(options, parameters), implementation)
            optimizer.step()
            states = [value for state in optimizer.state.values() for value in state.values()]
            assert {value.device for value in states if torch.is_tensor(value) and value.dim()} <= {GPU}
