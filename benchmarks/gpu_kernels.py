"""Measures whether a replay's tolerance (stepcheck/replay/compare.py) allows for the kernels that a GPU chooses.

A replay uses the same weights at other addresses, and may therefore get other kernels than the training.
`python -m benchmarks.gpu_kernels` prints the figures. Without a GPU it measures little, as a rehearsal.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from cifar_zero.models import build
from stepcheck.replay import compare
from stepcheck.replay.plain_copy import Computed


def alarms(device: torch.device) -> dict[str, str]:
    """Returns, as a text for each model, precision and kind of training, how many steps a replay would call wrong if
    the training uses other kernels than the replay: because its weights lie in one buffer, as at ZeRO 1 and 2 ("flat"),
    or because Inductor compiled it ("compiled")."""
    row: dict[str, str] = {}
    on_gpu = device.type == "cuda"
    for name in ("vit_tiny", "resnet18") if on_gpu else ("net",):
        for precision in ("autocast", "bfloat16", "float32"):
            for how in ("flat", "compiled") if on_gpu and precision != "bfloat16" else ("flat",):
                torch.manual_seed(0)
                plain = build(name, 10).to(device, torch.bfloat16 if precision == "bfloat16" else None)
                trained = _flattened(copy.deepcopy(plain)) if how == "flat" else copy.deepcopy(plain)
                if how == "compiled":
                    trained.compile(dynamic=False)
                row[f"{name}, {precision}, {how}"] = _alarms_of(trained, plain, precision, 8 if on_gpu else 2, device)
    return row


def _flattened(net: nn.Module) -> nn.Module:
    """Makes the parameters unaligned views of one buffer, in place, and returns the model. The first parameter begins
    at the second element of the buffer."""
    parameters = [*net.parameters()]
    flat = torch.empty(1 + sum(each.numel() for each in parameters), device=parameters[0].device)
    flat, first = flat.to(parameters[0].dtype), 1
    for each in parameters:
        part = flat[first : first + each.numel()]
        each.data = part.copy_(each.data.flatten()).view_as(each)
        first += each.numel()
    return net


def _step(net: nn.Module, precision: str, seed: int, size: int, device: torch.device) -> Computed:
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
    for name, figures in alarms(torch.device("cuda" if torch.cuda.is_available() else "cpu")).items():
        print(f"{name}: {figures}")


if __name__ == "__main__":
    main()
