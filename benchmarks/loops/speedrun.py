"""The reference of benchmarks/speedrun.py: the same recipe as a plain eager loop that uses only torch's own calls.

It works as the programs of the speed records do (airbench94_muon.py): the images are on the device, already normalised
and padded, an epoch is cropped as a whole, and Muon updates the filters one by one. It reads the options of
configs/speedrun.yaml that it needs, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loops.common import now
from cifar_zero import models
from cifar_zero.config.settings import Settings
from cifar_zero.data.augment import normalize
from cifar_zero.data.cache import Dataset
from cifar_zero.data.memory_loader import Stored


def train(settings: Settings, dataset: Dataset, device: torch.device) -> list[float]:
    """Trains on one device with a configuration of configs/speedrun.yaml; returns the seconds of each epoch."""
    torch.manual_seed(settings.recipe.seed)
    memory = (
        torch.channels_last if device.type == "cpu" or settings.placement.channels_last else torch.contiguous_format
    )
    net = models.build(settings.recipe.model.name, len(dataset.classes), **settings.recipe.model.options).to(device)
    net.to(memory_format=memory)
    stored = Stored(dataset.train_images, device)
    images = stored.take(torch.arange(len(dataset.train_labels), device=stored.rows_device))
    images = normalize(images.permute(0, 3, 1, 2).to(device), settings.data.inputs).contiguous(memory_format=memory)
    if device.type == "cuda" and settings.placement.precision == "bf16-mixed":
        images = images.bfloat16()  # as the references keep them, in half the memory
    labels = torch.tensor(dataset.train_labels, device=device)
    flip = torch.rand(len(images), device=device) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    padded = F.pad(
        images,
        (settings.recipe.augment.crop,) * 4,
        mode="reflect" if settings.recipe.augment.padding == "reflect" else "constant",
    )

    rates = settings.recipe.optimizer.options
    filters = [weight for weight in net.parameters() if weight.dim() == 4 and weight.requires_grad]
    biases = [bias for bias in net.parameters() if bias.dim() == 1 and bias.requires_grad]
    head = [weight for weight in net.parameters() if weight.dim() == 2]
    groups = [{"params": biases, "lr": rates["bias_lr"]}, {"params": head, "lr": rates["head_lr"]}]
    for group in groups:
        group["weight_decay"] = rates["weight_decay"] / group["lr"]
    sgd = torch.optim.SGD(groups, momentum=rates["sgd_momentum"], nesterov=True)
    muon = muon_step(filters, rates["momentum"], rates["ns_steps"])
    total, done, seconds = settings.recipe.epochs * (len(images) // settings.recipe.batch_size), 0, list[float]()
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.placement.precision == "bf16-mixed")
    for epoch in range(settings.recipe.epochs):
        begun = now(device)
        turned = padded.flip(3) if epoch % 2 else padded
        for inputs, targets in batches(cropped(turned, images.shape[2]), labels, settings.recipe.batch_size):
            with autocast:
                scores = net(inputs.contiguous(memory_format=memory))
            loss = F.cross_entropy(scores.float(), targets, label_smoothing=settings.recipe.label_smoothing)
            net.zero_grad(set_to_none=True)
            loss.backward()
            for group in sgd.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * (1 - done / total)
            sgd.step()
            muon(rates["lr"] * (1 - done / total))
            done += 1
        seconds.append(now(device) - begun)
    return seconds


def muon_step(filters: Sequence[Tensor], momentum: float, iterations: int) -> Callable[[float], None]:
    """Returns Muon's step as a function of the learning rate; it normalises and updates the filters one by one."""
    sums = [torch.zeros_like(weight) for weight in filters]

    @torch.no_grad()
    def step(rate: float) -> None:
        for weight, total in zip(filters, sums, strict=True):
            assert weight.grad is not None
            total.mul_(momentum).add_(weight.grad)
            matrix = weight.grad.add(total, alpha=momentum).reshape(len(weight), -1)
            matrix = matrix.bfloat16() if matrix.is_cuda else matrix
            matrix = matrix / matrix.norm()
            tall = matrix.shape[0] > matrix.shape[1]
            matrix = matrix.T if tall else matrix
            for _ in range(iterations):
                gram = matrix @ matrix.T
                matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
            matrix = matrix.T if tall else matrix
            weight.mul_(len(weight) ** 0.5 / weight.norm())
            weight.sub_(rate * matrix.reshape(weight.shape))

    return step


def cropped(padded: Tensor, side: int) -> Tensor:
    """Returns a random square of `side` pixels of each padded image: (N, 3, S, S) to (N, 3, side, side)."""
    places = padded.shape[2] - side + 1
    corners = torch.randint(places, (len(padded), 2), device=padded.device)
    found = padded[:, :, :side, :side].clone()
    for y in range(places):
        for x in range(places):
            here = (corners[:, 0] == y) & (corners[:, 1] == x)
            found[here] = padded[here, :, y : y + side, x : x + side]
    return found


def batches(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields whole batches in a random order."""
    order = torch.randperm(len(images), device=images.device)
    for rows in order[: len(order) // size * size].split(size):
        yield images[rows], labels[rows]
