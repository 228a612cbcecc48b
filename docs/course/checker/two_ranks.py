"""Checks answers that run on two ranks. Each check returns what is right, or raises Wrong."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from checker.comparing import Wrong, assert_same, assert_same_gradients, gradients_of, new_net, random_images


def average_gradients(answer: Callable[..., None]) -> str:
    """Exercise 9: compares the gradients after the average over two ranks with those of the whole batch."""
    (images, labels), model, rank = random_images(16), new_net(), distributed.get_rank()
    for parameter, gradient in zip(
        model.parameters(), gradients_of(model, images[rank::2], labels[rank::2]), strict=True
    ):
        parameter.grad = gradient
    answer(model)
    hint = "sum each gradient over the ranks, divide by their number, leave the result in .grad"
    assert_same_gradients(f"rank {rank}: ", model, images, labels, hint)
    return "both ranks have the gradient of the whole batch"


def zero_1_step(answer: Callable[..., Tensor]) -> str:
    """Exercise 10: compares four steps of ZeRO 1 on two ranks with those of torch's SGD on the whole batch."""
    rank, model = distributed.get_rank(), new_net()
    weights = parameters_to_vector(model.parameters()).detach()
    plain, momentum = nn.Parameter(weights.clone()), torch.zeros(len(weights) // 2)
    optimizer = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    for step in range(1, 5):
        images, labels = random_images(16, seed=step)
        vector_to_parameters(plain.detach().clone(), model.parameters())
        plain.grad = parameters_to_vector(gradients_of(model, images, labels))
        optimizer.step()
        vector_to_parameters(weights.clone(), model.parameters())
        gradient = parameters_to_vector(gradients_of(model, images[rank::2], labels[rank::2]))
        weights = answer(weights.clone(), gradient, momentum, 0.1, 0.9)
        expected = optimizer.state[plain]["momentum_buffer"].chunk(2)[rank]
        hint = "0.9 times itself plus the averaged gradient, in place"
        assert_same(f"rank {rank}, step {step}: the momentum", momentum, expected, hint)
        hint = "lr times the momentum less in each half, both halves in the order of the ranks"
        assert_same(f"rank {rank}, step {step}: the result", weights, plain.detach(), hint)
    return f"four steps are plain torch's, with {len(momentum):,} of {len(weights):,} momenta on each rank"


def clip_shard(answer: Callable[..., Tensor]) -> str:
    """Exercise 11: compares shards of 7 and 5 elements with the parts of what torch clips in one process."""
    rank = distributed.get_rank()
    for max_norm in (1.0, 100.0):
        full = nn.Parameter(torch.zeros(12))
        full.grad = torch.linspace(-3, 5, 12)
        actual = answer(full.grad.split([7, 5])[rank].clone(), max_norm)
        norm = float(clip_grad_norm_([full], max_norm))
        hint = (
            f"the global norm is {norm:.4g}: the root of the sum of the squares on all ranks; scale only a larger one"
        )
        assert_same(f"rank {rank}: the shard clipped at {max_norm:g}", actual, full.grad.split([7, 5])[rank], hint)
    return "the shards are those of the clipped full gradient, and small gradients stay as they are"


def zero_3_step(answer: Callable[..., Tensor]) -> str:
    """Exercise 15: compares four steps of ZeRO 3 on two ranks with those of a plain model on the whole batch. No two
    layers may be gathered at the same time."""
    rank, widths = distributed.get_rank(), (12, 16, 16, 10)
    torch.manual_seed(0)
    shapes = [(outputs, inputs) for inputs, outputs in itertools.pairwise(widths)]
    plain = [nn.Parameter(torch.randn(shape) / shape[1] ** 0.5) for shape in shapes]
    shards = [weight.detach().flatten().chunk(2)[rank].clone() for weight in plain]
    optimizer = torch.optim.SGD(plain, lr=0.1)
    for step in range(1, 5):
        x, labels = torch.randn(16, widths[0]), torch.randint(10, (16,))
        loss = _mlp_loss(plain, x[rank::2], labels[rank::2]).detach()
        optimizer.zero_grad()
        _mlp_loss(plain, x, labels).backward()
        optimizer.step()
        where = f"rank {rank}, step {step}: "
        with _Gathers(where) as gathers, torch.no_grad():
            actual = answer(shards, shapes, x[rank::2].clone(), labels[rank::2].clone(), 0.1)
        if gathers.count < 4:  # a correct answer may keep the last layer's weight from the forward pass
            hint = (
                "free each weight after use, gather it again for the backward pass, and write `distributed.` before it"
            )
            raise Wrong(f"{where}{gathers.count} calls of distributed.all_gather_into_tensor, not at least 4: {hint}")
        assert_same(f"{where}the loss", actual, loss, "the mean cross-entropy of this rank's images, before the update")
        for layer, (shard, weight) in enumerate(zip(shards, plain, strict=True), start=1):
            hint = "lr times the mean gradient over the ranks less, in place; gather W before you update its shard"
            assert_same(f"{where}the shard of layer {layer}", shard, weight.detach().flatten().chunk(2)[rank], hint)
    return f"four steps are plain torch's, with {gathers.count} gathers per step and one layer gathered at a time"


def _mlp_loss(weights: Sequence[Tensor], x: Tensor, labels: Tensor) -> Tensor:
    for weight in weights[:-1]:
        x = (x @ weight.T).relu()
    return nn.functional.cross_entropy(x @ weights[-1].T, labels)


class _Gathers:
    """Counts the calls of all_gather_into_tensor. A gathered tensor must be freed before the next one is gathered."""

    def __init__(self, where: str):
        self.where, self.count = where, 0
        self.last: StorageWeakRef | None = None
        self.original = distributed.all_gather_into_tensor

    def __enter__(self) -> "_Gathers":
        distributed.all_gather_into_tensor = self._gather
        return self

    def __exit__(self, *_: object) -> None:
        distributed.all_gather_into_tensor = self.original

    def _gather(self, output_tensor: Tensor, *args: Any, **options: Any) -> Any:
        until = time.monotonic() + 2  # gloo's threads may hold a tensor for a moment longer
        while self.last is not None and not self.last.expired():
            if time.monotonic() > until:
                hint = "`del` it after use"
                raise Wrong(f"{self.where}a gathered layer is still in memory at gather {self.count + 1}: {hint}")
            time.sleep(0.001)
        self.last, self.count = StorageWeakRef(output_tensor.untyped_storage()), self.count + 1
        return self.original(output_tensor, *args, **options)
