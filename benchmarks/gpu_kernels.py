"""Measures which kernels a GPU chooses, and how far a replay's tolerance (stepcheck/replay/compare.py) allows for them.

A replay uses the same weights at other addresses, and may therefore get other kernels than the training.
`python -m benchmarks.gpu_kernels` prints the figures. Without a GPU it measures little, as a rehearsal.
"""

import copy
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cifar_zero.models import build
from stepcheck.replay import compare
from stepcheck.replay.plain_copy import Computed

ALIGNMENT = 512  # bytes to which torch aligns an allocation
OFFSETS = (256, 64, 16, 8, 4)  # bytes behind a multiple of ALIGNMENT

Row = dict[str, Any]


def products(device: torch.device) -> Row:
    """Returns, for each dtype, the share of elements of a linear layer's output and gradients that change with the
    address of the weight, and whether a repetition is bit-identical."""
    row: Row = {}
    sizes = ((64, 37, 37), (64, 400, 120), (4096, 192, 576), (4096, 1024, 4096))
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        for rows, inputs, outputs in sizes if device.type == "cuda" else sizes[:2]:
            shapes = (rows, inputs), (outputs, inputs), (rows, outputs)
            x, weight, gradient = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
            first = _linear(x, weight, gradient)
            repeats = _changed(first, _linear(x, weight, gradient)) == 0
            changed = {offset: _changed(first, _linear(x, _moved(weight, offset), gradient)) for offset in OFFSETS}
            largest = max(changed, key=lambda offset: changed[offset])
            text = f"{changed[largest]:.1%} at {largest} bytes" if changed[largest] else "none"
            row[f"{name} {rows}x{inputs}x{outputs}"] = text if repeats else f"{text}; repetitions differ"
    return row


def convolutions(device: torch.device) -> Row:
    """Returns the relative errors of convolutions in float32, with and without TF32, as smallest and largest over
    memory formats and addresses. A ratio of a thousand says that both kinds of kernels were chosen."""
    row: Row = {}
    cudnn: Any = torch.backends.cudnn
    for inputs, outputs, size, kernel in ((3, 6, 32, 5), (6, 16, 14, 5), (3, 64, 32, 3), (64, 128, 16, 3)):
        x, weight = (torch.randn(64, inputs, size, size, device=device), torch.randn(outputs, inputs, kernel, kernel))
        weight = weight.to(device)
        exact = F.conv2d(x.double(), weight.double())
        for tf32 in (False, True):
            cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
            errors = [
                float((F.conv2d(each, _moved(weight, offset)).double() - exact).norm() / exact.norm())
                for each in (x, x.contiguous(memory_format=torch.channels_last))
                for offset in (0, 16, 4)
            ]
            name = f"{inputs} to {outputs}, {'TF32' if tf32 else 'float32'}"
            row[name] = f"{min(errors):.1e} to {max(errors):.1e}"
    return row


def alarms(device: torch.device) -> Row:
    """Returns how many steps a replay would call wrong, if the training uses other kernels: its weights lie in one flat
    buffer, as at ZeRO 1 and 2, or Inductor has compiled it."""
    row: Row = {}
    on_gpu = device.type == "cuda"
    models = {"vit_tiny": {}, "resnet18": {}} if on_gpu else {"net": {}}
    for name, options in models.items():
        for precision in ("autocast", "bfloat16", "float32"):
            for how in ("flat", "compiled") if on_gpu and precision != "bfloat16" else ("flat",):
                torch.manual_seed(0)
                plain = build(name, 10, **options).to(device, torch.bfloat16 if precision == "bfloat16" else None)
                trained = _flattened(copy.deepcopy(plain)) if how == "flat" else copy.deepcopy(plain)
                if how == "compiled":
                    trained.compile(dynamic=False)
                row[f"{name}, {precision}, {how}"] = _alarms_of(trained, plain, precision, 8 if on_gpu else 2, device)
    return row


def costs(device: torch.device) -> Row:
    """Returns the seconds of a forward and backward pass in each precision."""
    row: Row = {}
    on_gpu = device.type == "cuda"
    for name, size in (("vit_tiny", 128), ("vit_large", 32)) if on_gpu else (("net", 8),):
        for precision in ("autocast", "float32", "float64"):
            net = build(name, 10).to(device, torch.float64 if precision == "float64" else None)
            times = []
            for seed in range(3):  # the first chooses kernels
                started = time.perf_counter()
                _step(net, precision, seed, size, device)
                if on_gpu:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            row[f"{name}, {precision}"] = round(min(times), 4)
    return row


def _moved(tensor: Tensor, offset: int) -> Tensor:
    """Returns a copy that lies `offset` bytes behind a multiple of ALIGNMENT."""
    first = offset // tensor.element_size()
    flat = torch.empty(tensor.numel() + first, dtype=tensor.dtype, device=tensor.device)
    return flat[first:].copy_(tensor.flatten()).view_as(tensor)


def _linear(x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.detach().requires_grad_()
    output = F.linear(x, weight)
    return [output.detach(), *torch.autograd.grad(output, (x, weight), gradient)]


def _changed(some: list[Tensor], others: list[Tensor]) -> float:
    """Returns the largest share of elements that differ in a pair of tensors."""
    return max(float((one != other).float().mean()) for one, other in zip(some, others, strict=True))


def _flattened(net: nn.Module) -> nn.Module:
    """Makes the parameters views of one buffer that are not aligned."""
    parameters = [*net.parameters()]
    flat = torch.empty(1 + sum(each.numel() for each in parameters), device=parameters[0].device)
    flat, first = flat.to(parameters[0].dtype), 1
    for each in parameters:
        part = flat[first : first + each.numel()]
        each.data = part.copy_(each.data.flatten()).view_as(each)
        first += each.numel()
    return net


def _step(net: nn.Module, precision: str, seed: int, size: int, device: torch.device) -> Computed:
    """Returns the loss and the gradients of a batch."""
    torch.manual_seed(seed)
    images, labels = torch.randn(size, 3, 32, 32, device=device), torch.randint(0, 10, (size,), device=device)
    dtype = next(net.parameters()).dtype
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
        output = net(images.to(dtype))
        loss = F.cross_entropy(output if dtype == torch.float64 else output.float(), labels)
    net.zero_grad()
    loss.backward()
    computed = Computed()
    computed.losses.append(loss.detach())
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            computed.add(name, parameter.grad)
    return computed


def _alarms_of(trained: nn.Module, plain: nn.Module, precision: str, steps: int, device: torch.device) -> str:
    lowest = torch.float32 if precision == "float32" else torch.bfloat16
    exact = copy.deepcopy(plain).double()
    wrong, worst, same = 0, 0.0, 0
    for seed in range(steps):
        actual, low = (_step(each, precision, seed, 64, device) for each in (trained, plain))
        high = _step(exact, "float64", seed, 64, device)
        same += compare.identical(actual, low)
        rounding = compare.mean_square(compare.loss_errors(low, high))
        shares = [each.share for each in compare.compare(actual, low, high, lowest, rounding)]
        wrong, worst = wrong + (max(shares) > 1), max(worst, *shares)
    return f"{wrong} of {steps}, {same} identical, {worst:.2g} of a tolerance"


def main() -> None:
    """Measures and prints."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for part in (products, convolutions, alarms, costs):
        print(f"{part.__name__}:")
        for name, figures in part(device).items():
            print(f"  {name}: {figures}")


if __name__ == "__main__":
    main()
