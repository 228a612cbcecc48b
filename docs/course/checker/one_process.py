"""Checks answers that need one process and torch only. Each check returns what is right, or raises Wrong."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from checker.comparing import Wrong, assert_all_same, assert_same, assert_same_gradients, new_net, random_images


def linear(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 1: compares value and gradients of a linear layer with autograd's."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((5, 4), (3, 4), (3,))]  # x, weight, bias
    upstream = torch.randn(5, 3)
    y = nn.functional.linear(*inputs)
    of_x, of_weight, of_bias = torch.autograd.grad(y, inputs, upstream)
    expected = {
        "y": (y.detach(), "each row of x times the transposed weight, plus the bias"),
        "the gradient of x": (of_x, "upstream times the weight: the sum over the outputs"),
        "the gradient of weight": (of_weight, "the transposed upstream times x: the sum over the rows"),
        "the gradient of bias": (of_bias, "the bias is in every row: sum over them, without a mean"),
    }
    assert_all_same(answer(*(tensor.detach().clone() for tensor in inputs), upstream), expected)
    return "value and three gradients are autograd's"


def relu(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 2: compares value and gradient of a ReLU with autograd's."""
    torch.manual_seed(0)
    x, upstream = torch.randn(4, 6), torch.randn(4, 6)
    x[:, 0] = 0
    y = x.requires_grad_().relu()
    (of_x,) = torch.autograd.grad(y, [x], upstream)
    expected = {
        "y": (y.detach(), "the larger of x and 0"),
        "the gradient of x": (of_x, "upstream where x is positive, else 0"),
    }
    assert_all_same(answer(x.detach().clone(), upstream), expected)
    return "value and gradient are autograd's"


def max_pool(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 3: compares the maxima of 2 x 2 windows, and their gradient, with autograd's."""
    images, _ = random_images(2)
    leaf, upstream = images.clone().requires_grad_(), torch.randn(2, 3, 16, 16)
    y = nn.functional.max_pool2d(leaf, 2)
    (of_images,) = torch.autograd.grad(y, [leaf], upstream)
    expected = {
        "y": (y.detach(), "the largest of each 2 x 2 window, for each image and channel"),
        "the gradient of images": (of_images, "upstream where the window's largest value was, else 0"),
    }
    assert_all_same(answer(images.clone(), upstream), expected)
    return "the maxima and their gradient are autograd's"


def convolution_size(answer: Callable[..., tuple[int, int]]) -> str:
    """Exercise 4: compares the side of the output and the number of parameters with a layer of torch."""
    sizes = ((32, 3, 6, 5, 1, 0), (32, 3, 64, 3, 1, 1), (32, 64, 128, 3, 2, 1), (224, 3, 32, 3, 2, 1))
    for side, channels, filters, kernel, stride, padding in sizes:
        with torch.device("meta"):
            layer = nn.Conv2d(channels, filters, kernel, stride, padding)
            output = layer(torch.empty(1, channels, side, side)).shape[-1]
        expected = output, sum(parameter.numel() for parameter in layer.parameters())
        actual = answer(side, channels, filters, kernel, stride, padding)
        if actual != expected:
            raise Wrong(
                f"side {side}, {channels} channels, {filters} filters of {kernel} x {kernel}, stride {stride}, padding "
                f"{padding}: {actual!r}, not {expected}: positions are rounded down, and each filter has a bias"
            )
    return f"sides and parameters of {len(sizes)} convolutions are torch's"


def convolution_gradients(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 5: compares the gradients of a convolution with autograd's."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 7, 7, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    upstream = torch.randn(2, 4, 5, 5)
    of_images, of_weight = torch.autograd.grad(nn.functional.conv2d(*inputs), inputs, upstream)
    expected = {
        "the gradient of images": (of_images, "each output position adds upstream times the filter to its window"),
        "the gradient of weight": (of_weight, "each output position adds upstream times its window, over all images"),
    }
    assert_all_same(answer(*(tensor.detach().clone() for tensor in inputs), upstream), expected)
    return "both gradients are autograd's"


def cross_entropy_gradient(answer: Callable[..., Tensor]) -> str:
    """Exercise 6: compares the gradient of the mean cross-entropy with autograd's, for large logits too."""
    for scale in (1, 1000):
        torch.manual_seed(0)
        logits, labels = scale * torch.randn(6, 10), torch.randint(10, (6,))
        leaf = logits.clone().requires_grad_()
        (expected,) = torch.autograd.grad(nn.functional.cross_entropy(leaf, labels), [leaf])
        hint = "softmax minus one-hot, divided by the number of images; subtract each row's maximum before exp"
        assert_same(f"the gradient of logits of size {scale:,}", answer(logits, labels), expected, hint)
    return "the gradient is autograd's, for logits of size 1,000 too"


def accumulate(answer: Callable[..., None]) -> str:
    """Exercise 8: compares the gradients after three micro-batches with those of the whole batch."""
    (images, labels), model, seen = random_images(20), new_net(), []
    # The model's own hooks do not see model.forward(images).
    model.get_submodule("conv1").register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    answer(model, [*zip(images.split(8), labels.split(8), strict=True)])
    if seen != [8, 8, 4]:
        raise Wrong(f"the model saw {seen} images at a time, not [8, 8, 4]: one forward pass for each micro-batch")
    hint = "each image counts 1/20: weigh the mean loss of a micro-batch by its share of the images"
    assert_same_gradients("", model, images, labels, hint)
    return "micro-batches of 8, 8 and 4 images leave the gradient of the batch of 20"


def bytes_per_rank(answer: Callable[..., float]) -> str:
    """Exercise 12: compares the bytes with those of the ZeRO paper (Rajbhandari et al. 2020, section 5)."""
    sharded = ("nothing", "the optimizer's 12 bytes", "the gradient too", "the parameter too")
    for parameters, stage, ranks in itertools.product((10**9, 7 * 10**9), range(4), (1, 8, 64)):
        expected = parameters * (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]
        actual = answer(stage, parameters, ranks)
        if not abs(actual - expected) <= 1e-6 * expected:
            raise Wrong(
                f"stage {stage}, {parameters:,} parameters, {ranks} ranks: {actual!r}, not {expected}, "
                f"{expected / parameters:g} bytes per parameter: parameter 2, gradient 2, optimizer 12; "
                f"this stage shards {sharded[stage]}"
            )
    return "all 24 sizes are those of the ZeRO paper"


def lora_cost(answer: Callable[..., tuple[int, int, float]]) -> str:
    """Exercise 14: compares the size of an adapter, its training state and its FLOPs with a layer of this program."""
    from cifar_zero.build_model import LoRALinear
    from cifar_zero.config.recipe import LoRAConfig

    for inputs, outputs, rank in ((192, 576, 8), (400, 120, 4), (4096, 4096, 32)):
        with torch.device("meta"):
            layer = LoRALinear(nn.Linear(inputs, outputs), LoRAConfig(rank=rank))
        trained = layer.lora_a.numel() + layer.lora_b.numel()
        expected = trained, 12 * trained, trained / (inputs * outputs)
        actual = answer(inputs, outputs, rank)
        if not isinstance(actual, tuple) or tuple(f"{value:.6g}" for value in actual) != tuple(
            f"{value:.6g}" for value in expected
        ):
            raise Wrong(
                f"{inputs} inputs, {outputs} outputs, rank {rank}: {actual!r}, not {expected}: A is rank x inputs, B "
                "outputs x rank; gradient and two moments are 4 bytes each; a product costs 2 FLOPs for each weight"
            )
    return "sizes and FLOPs are those of this program's adapters"


def bytes_sent(answer: Callable[..., float]) -> str:
    """Exercise 16: compares the bytes that a rank sends in a step with those of the ZeRO paper (section 7)."""
    counts = (2, 2, 2, 3)
    sends = (
        "an all-reduce of the gradients",
        *["a reduce-scatter of the gradients and an all-gather of the parameters"] * 2,
        "two all-gathers of the parameters and a reduce-scatter of the gradients",
    )
    for parameters, stage, ranks in itertools.product((62_006, 7 * 10**9), range(4), (1, 2, 64)):
        expected = 2 * counts[stage] * parameters * (ranks - 1) / ranks
        actual = answer(stage, parameters, ranks)
        if not abs(actual - expected) <= 1e-6 * expected:
            raise Wrong(
                f"stage {stage}, {parameters:,} parameters, {ranks} ranks: {actual!r}, not {expected:g}: "
                f"{sends[stage]}; in a ring, an all-reduce costs as much as the other two together"
            )
    return "all 24 sizes are those of the ZeRO paper"
