"""A typical wrong answer to each exercise of docs/course/exercises.md."""

import torch.nn.functional as F
from torch import Tensor, distributed

from docs.course import solutions


def linear(x, weight, bias, upstream):
    return x @ weight.T + bias, upstream @ weight, upstream.T @ x, upstream.mean(0)


def relu(x, upstream):
    return x.clamp(min=0), upstream.clamp(min=0)


def max_pool(images, upstream):
    grown = upstream.repeat_interleave(2, 2).repeat_interleave(2, 3)
    return F.max_pool2d(images, 2), grown / 4  # the gradient of average pooling


def convolution_size(side, channels, filters, kernel, stride, padding):
    return (side - kernel) // stride + 1, filters * channels * kernel**2


def convolution_gradients(images, weight, upstream):
    return F.conv2d(upstream, weight.transpose(0, 1), padding=2), weight  # the filters are not turned around


def cross_entropy_gradient(logits, labels):
    return logits.softmax(1) - F.one_hot(labels, logits.shape[1])


def lora_cost(inputs, outputs, rank):
    return rank * inputs * outputs, 12 * rank * inputs * outputs, rank


def training_step(self, batch, batch_idx):
    images, labels = batch
    return F.cross_entropy(self.forward(images).softmax(1), labels)


def accumulate(model, micro_batches):
    for images, labels in micro_batches:
        (F.cross_entropy(model(images), labels) / len(micro_batches)).backward()


def average_gradients(model):
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)


def zero_1_step(parameters, gradient, momentum, lr, mu):
    return solutions.zero_1_step(parameters, gradient, momentum.clone(), lr, mu)


def clip_shard(shard, max_norm):
    return shard * min(1.0, max_norm / float(shard.norm()))


def bytes_per_rank(stage, parameters, ranks):
    return parameters * (16, 2 + 14 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]


def batch_for_zero():
    return 8 * 335


def zero_3_step(shards, shapes, x, labels, lr):
    """Gathers all layers before the first is used, as ZeRO 2 does."""
    weights = [solutions._gathered(shard, shape) for shard, shape in zip(shards, shapes, strict=True)]
    return weights


def bytes_sent(stage, parameters, ranks):
    return 2 * 2 * parameters * (ranks - 1) / ranks


class Broken(solutions.Healthy):
    """Agrees under every strategy, because plain PyTorch computes the same loss."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return 0.5 * super().training_step(batch, batch_idx)
