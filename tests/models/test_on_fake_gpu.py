"""Runs every model and optimizer on a fake GPU (torch's FakeTensorMode). A tensor on another device, or a step that
waits for a value, fails as on a real GPU. The backward pass and fused SGD have no fake form in torch 2.15."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.models import MODELS
from cifar_zero.optimizers import OPTIMIZERS, Adam, Adam8bit
from cifar_zero.optimizers.groups import parameter_groups
from tests.support.helpers import of_test_all

GPU = torch.device("cuda", 0)


def is_channels_last(images: torch.Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)


LARGE = ("resnet34", "resnet50", "vit_small", "vit_base", "vit_large", "vit_1b", "vit_13b")
"""Models that run the same code as a smaller model."""


@pytest.mark.parametrize("model", [pytest.param(name, marks=of_test_all) if name in LARGE else name for name in MODELS])
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
        parameters = dict(module.named_parameters())
        one_of_each_shape = {parameter.shape: parameter for parameter in parameters.values()}
        for parameter in one_of_each_shape.values():  # the 41 blocks of vit_13b would take their time
            parameter.grad = torch.empty_like(parameter)
        for options in (make() for make in OPTIMIZERS.values() if make is not Adam8bit):  # bitsandbytes' own kernels
            for implementation in ("torch", "torch_fused") if isinstance(options, Adam) else ("torch",):
                options.build(parameter_groups(options, parameters), implementation).step()
