"""Right answers to docs/exercises.md."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.users_code.own_modules import Own


def linear(x, weight, bias, upstream):
    return x @ weight.T + bias, upstream @ weight, upstream.T @ x, upstream.sum(0)


def relu(x, upstream):
    return x.clamp(min=0), upstream * (x > 0)


def max_pool(images):
    n, channels, height, width = images.shape
    return images.view(n, channels, height // 2, 2, width // 2, 2).amax((3, 5))


def convolution_size(side, channels, filters, kernel, stride, padding):
    return (side + 2 * padding - kernel) // stride + 1, filters * (channels * kernel**2 + 1)


def convolution_gradients(images, weight, upstream):
    of_images = F.conv_transpose2d(upstream, weight)
    of_weight = F.conv2d(images.transpose(0, 1), upstream.transpose(0, 1)).transpose(0, 1)
    return of_images, of_weight


def cross_entropy_gradient(logits, labels):
    return (logits.softmax(1) - F.one_hot(labels, logits.shape[1])) / len(labels)


def lora_cost(inputs, outputs, rank):
    trained = rank * (inputs + outputs)
    return trained, 12 * trained


def training_step(self, batch, batch_idx):
    images, labels = batch
    return F.cross_entropy(self.forward(images), labels)


def accumulate(model, micro_batches):
    total = sum(len(labels) for _, labels in micro_batches)
    for images, labels in micro_batches:
        (F.cross_entropy(model(images), labels) * len(labels) / total).backward()


def average_gradients(model):
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= distributed.get_world_size()


def zero_1_step(parameters, gradient, momentum, lr, mu):
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    own = torch.empty_like(momentum)
    distributed.reduce_scatter_tensor(own, gradient)
    momentum.mul_(mu).add_(own / ranks)
    distributed.all_gather_into_tensor(parameters, parameters.chunk(ranks)[rank] - lr * momentum)
    return parameters


def clip_shard(shard, max_norm):
    squares = shard.square().sum()
    distributed.all_reduce(squares)
    return shard * min(1.0, max_norm / float(squares.sqrt()))


def bytes_per_rank(stage, parameters, ranks):
    return parameters * (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]


def batch_for_zero():
    return 8 * 336


class Healthy(Own):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)
        nn.init.zeros_(self.net.weight)  # any other start may not learn within 8 steps

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader:
        images = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images, (images[:, 0] > 0).long()), 8)


class Broken(Healthy):
    """Shrinks its weights by hand, which has no effect under ZeRO because ZeRO updates float32 copies of them."""

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            self.net.weight.mul_(0.9)
