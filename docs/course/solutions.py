"""Commented solutions of exercises.md: `python docs/course/exercises.py all docs/course/solutions.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset


def linear(x, weight, bias, upstream):
    # Each gradient has the shape of its tensor, which leaves one possible product. The bias is added to every row, so
    # its gradient sums over the rows.
    return x @ weight.T + bias, upstream @ weight, upstream.T @ x, upstream.sum(0)


def relu(x, upstream):
    return x.clamp(min=0), upstream * (x > 0)  # the condition is on x, not on upstream


def max_pool(images, upstream):
    y = images.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))  # (N, C, 16, 16, 2, 2) -> (N, C, 16, 16)
    # Write each output into all four positions of its window. Only the position that had the maximum changed the
    # output, so only it gets the gradient. (Random images have no ties.)
    maxima, spread = (tensor.repeat_interleave(2, 2).repeat_interleave(2, 3) for tensor in (y, upstream))
    return y, spread * (images == maxima)


def convolution_size(side, channels, filters, kernel, stride, padding):
    return (side + 2 * padding - kernel) // stride + 1, filters * (channels * kernel**2 + 1)  # 1: the bias


def convolution_gradients(images, weight, upstream):
    of_images, of_weight = torch.zeros_like(images), torch.zeros_like(weight)
    kernel = weight.shape[-1]
    for row in range(upstream.shape[2]):
        for column in range(upstream.shape[3]):
            window = (..., slice(row, row + kernel), slice(column, column + kernel))
            of_output = upstream[:, :, row, column]  # (N, filters)
            # At one position, the convolution is a linear layer on the window: exercise 1, with a window of inputs.
            of_images[window] += torch.einsum("nf,fckl->nckl", of_output, weight)
            of_weight += torch.einsum("nf,nckl->fckl", of_output, images[window])
    return of_images, of_weight


def cross_entropy_gradient(logits, labels):
    # torch's softmax subtracts each row's maximum first. The mean over the images divides by their number.
    return (logits.softmax(1) - torch.eye(logits.shape[1])[labels]) / len(labels)


def training_step(self, batch, batch_idx):
    images, labels = batch
    return F.cross_entropy(self.forward(images), labels)  # raw logits; Lightning runs the rest


def accumulate(model, micro_batches):
    total = sum(len(labels) for _, labels in micro_batches)
    for images, labels in micro_batches:
        # The mean over 8 of 20 images counts 8/20. backward() adds to .grad.
        (F.cross_entropy(model(images), labels) * len(labels) / total).backward()


def average_gradients(model):
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)  # a sum, which every rank gets
        parameter.grad /= distributed.get_world_size()


def zero_1_step(parameters, gradient, momentum, lr, mu):
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    own = torch.empty_like(momentum)
    distributed.reduce_scatter_tensor(own, gradient)  # the sum of the half that this rank updates
    momentum.mul_(mu).add_(own / ranks)
    distributed.all_gather_into_tensor(parameters, parameters.chunk(ranks)[rank] - lr * momentum)
    return parameters


def clip_shard(shard, max_norm):
    squares = shard.square().sum()
    distributed.all_reduce(squares)  # squares add up over the ranks, norms do not
    return shard * min(1.0, max_norm / float(squares.sqrt()))


def bytes_per_rank(stage, parameters, ranks):
    return parameters * (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]


def batch_for_zero():
    return 8 * 336  # 335 images per rank fit under DDP, and more under ZeRO 2


def lora_cost(inputs, outputs, rank):
    trained = rank * inputs + outputs * rank
    # A product with a matrix of n elements takes 2n FLOPs per token, so FLOPs are in the ratio of the sizes.
    return trained, (4 + 8) * trained, trained / (inputs * outputs)


def zero_3_step(shards, shapes, x, labels, lr):
    inputs = []  # of each layer, for the backward pass
    for shard, shape in zip(shards, shapes, strict=True):
        inputs.append(x if not inputs else x.relu())
        x = inputs[-1] @ _gathered(shard, shape).T  # the gathered weight has no name, so it is freed after this line
    loss = F.cross_entropy(x, labels)
    upstream = (x.softmax(1) - F.one_hot(labels, x.shape[1])) / len(labels)  # exercise 6
    for shard, shape, layer_input in reversed([*zip(shards, shapes, inputs, strict=True)]):
        of_weight = upstream.T @ layer_input  # exercise 1
        # Gather again: the forward pass has freed the weight. A ReLU's output is positive where its input is
        # (exercise 2). For the first layer, this line computes the gradient of the images, which nobody needs.
        upstream = upstream @ _gathered(shard, shape) * (layer_input > 0)
        own = torch.empty_like(shard)
        distributed.reduce_scatter_tensor(own, of_weight.flatten())
        shard -= lr * own / distributed.get_world_size()  # only now, because line 3 of this loop needs the old weight
    return loss


def _gathered(shard, shape):
    weight = torch.empty(shape)
    distributed.all_gather_into_tensor(weight.flatten(), shard)
    return weight


def bytes_sent(stage, parameters, ranks):
    # In numbers per parameter: an all-reduce is a reduce-scatter and an all-gather, each of (ranks - 1) / ranks.
    return 2 * (2, 2, 2, 3)[stage] * parameters * (ranks - 1) / ranks


class Healthy(LightningModule):
    """Learns whether the first number of eight is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)
        nn.init.zeros_(self.net.weight)  # any other start may not learn within 8 steps

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        numbers, labels = batch
        return F.cross_entropy(self.net(numbers), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader:
        numbers = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(numbers, (numbers[:, 0] > 0).long()), 8)


class Broken(Healthy):
    """Shrinks its weights by hand, which has no effect under ZeRO because ZeRO updates float32 copies of them."""

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            self.net.weight.mul_(0.9)
