"""Builds image classifiers of torchvision, under torchvision's names, and loads their pretrained weights."""

import re
from collections import OrderedDict
from collections.abc import Callable

import torch
import torchvision.models
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.core.errors import UsageError, short
from cifar_zero.core.usage import nearest
from stepcheck.lightning.user_code import where

Shape = tuple[int, int, int, int]
"""Shape (N, 3, H, W) of a micro-batch."""


def external(num_classes: int, options: models.External) -> nn.Module:
    """Returns a torchvision model that maps images (N, 3, H, W) to scores (N, num_classes), with freshly initialised
    weights, even if `options.weights` is set. If `options.image_size` is set, the model first scales the images, and
    the names of all its tensors begin with `net.`. Raises ValueError if torchvision has no classifier of this name, or
    if the classifier lacks one of the given options."""
    known = torchvision.models.list_models(module=torchvision.models)
    if options.architecture not in known:
        closest = nearest(options.architecture, known, most=3, cutoff=0)
        raise ValueError(f"torchvision has no classifier of this name, {closest}")
    arguments = {"num_classes": num_classes, **options.kwargs}
    try:  # options that are set in this function too raise TypeError
        net = built(lambda: torchvision.models.get_model(options.architecture, weights=None, **arguments))
    except TypeError as error:
        raise ValueError(f"kwargs do not fit: {short(error)}") from error
    if not options.image_size:
        return net
    scale = nn.Upsample(size=(options.image_size, options.image_size), mode="bilinear")
    return nn.Sequential(OrderedDict(scale=scale, net=net))


def pretrained(options: models.External) -> dict[str, Tensor]:
    """Returns torchvision's pretrained weights and buffers, keyed by the names in the model's state_dict. They are read
    from torch's cache, or downloaded if the cache lacks them. Only tensors are loaded. torch compares the hash of a
    downloaded file, but not of a cached one, with the hash in the file's name. Raises UsageError if there are no
    weights of that name, if the download fails, or if the file is damaged."""
    known = torchvision.models.get_model_weights(options.architecture).__members__
    if options.weights not in known:
        raise UsageError(f"--model.weights {options.weights}: {nearest(options.weights, known)}")
    entry = known[options.weights]
    try:
        weights = entry.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
    except Exception as error:  # an error of the network, the disk, the hash or the format
        raise UsageError(
            f"--model.weights {options.weights}: cannot load {entry.url} ({short(error)}): put this file into "
            f"{torch.hub.get_dir()}/checkpoints, or start from another one with --weights FILE"
        ) from error
    # Files of DenseNets have the parameter names of an older version, see torchvision's densenet.py.
    older, prefix = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])"), "net." if options.image_size else ""
    return {prefix + older.sub(r"\1\2", name): value for name, value in weights.items()}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """Calls `build` and returns the model on torch's default device. If `build` raises RuntimeError, it is called again
    on the CPU, and the model is then moved to that device."""
    try:
        return build()
    except RuntimeError:  # some models compute shapes from tensors, which have no values on the meta device
        with torch.device("cpu"):
            net = build()
        return net.to(torch.get_default_device())


def check(entry: models.Model, num_classes: int, images: Shape) -> None:
    """Builds a model and runs it on one micro-batch of zeros on torch's meta device, where tensors have no values. A
    user's model that fails there is tried again on the CPU. Raises ValueError if the model cannot be built, does not
    accept images of this shape, or does not return (N, num_classes) scores."""
    try:
        _try_out(entry, num_classes, images, "meta")
    except ValueError:
        if not entry.may_need_values:
            raise
        _try_out(entry, num_classes, images, "cpu")


def _try_out(entry: models.Model, num_classes: int, images: Shape, device: str) -> None:
    count, _, *size = images
    with torch.device(device):
        try:
            scores = entry.build(num_classes)(torch.zeros(images))
        except ValueError:
            raise
        except Exception as error:  # models raise errors of any kind for what they do not accept
            raise ValueError(
                f"cannot train on micro-batches of {count} x {size[0]} x {size[1]} pixels "
                f"({where(error)}{short(error)}); --model.image_size scales the images for a model of torchvision"
            ) from error
    shape = getattr(scores, "shape", type(scores).__name__)
    if shape != (count, num_classes):
        raise ValueError(
            f"returns {shape} instead of ({count}, {num_classes}), a score per class: give its last layer "
            f"{num_classes} outputs, or add an argument num_classes, which receives this number"
        )
