"""Image classifiers of torchvision and timm, by their names there, with freshly initialised weights."""

from __future__ import annotations

import textwrap
from collections import OrderedDict
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from cifar_zero import models

WITH_AUXILIARY_SCORES = ("googlenet", "inception_v3")
"""torchvision's models that also return auxiliary scores in training by default (torchvision 0.29)."""


def external(num_classes: int, options: models.External) -> nn.Module:
    """Returns a model that maps images (N, 3, H, W) to scores (N, num_classes).

    Raises:
        ValueError: the package is not installed, it has no such classifier, or the classifier no such option.
    """
    of_package = {"torchvision": _torchvision, "timm": _timm}[options.package]
    build = partial(of_package, options.architecture, {"num_classes": num_classes, **options.kwargs})
    try:
        try:
            net = build()
        except RuntimeError:  # some compute shapes from tensors, which have no values on the meta device
            with torch.device("cpu"):
                net = build()
            net.to(torch.get_default_device())
    except TypeError as error:
        raise ValueError(f"kwargs do not fit: {_short(error)}") from error
    if not options.image_size:
        return net
    scale = nn.Upsample(size=(options.image_size, options.image_size), mode="bilinear")
    return nn.Sequential(OrderedDict(scale=scale, net=net))


def check(entry: models.Model, num_classes: int, images: tuple[int, int, int, int]) -> None:
    """Builds a model and runs it on training images, all without values (torch's meta device).

    `images` is the shape (N, 3, H, W) of a micro-batch.

    Raises:
        ValueError: it cannot be built, does not accept such images, or does not return (N, num_classes) scores.
    """
    count, _, *size = images
    # Models raise errors of any kind for what they do not accept.
    with torch.device("meta"):
        try:
            net = entry.build(num_classes)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"cannot be built: {_short(error)}") from error
        try:
            scores = net(torch.empty(images))
        except Exception as error:
            raise ValueError(
                f"cannot train on {count} image{'s'[: count > 1]} of {size[0]} x {size[1]} pixels at a time "
                f"({_short(error)}): scale them with --model.image_size"
            ) from error
    if not isinstance(scores, Tensor) or scores.shape != (count, num_classes):
        raise ValueError(f"does not return {num_classes} scores for an image")


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    import torchvision.models

    _check_known(name, "torchvision", torchvision.models.list_models(module=torchvision.models))
    without = {"aux_logits": False} if name in WITH_AUXILIARY_SCORES else {}
    return torchvision.models.get_model(name, weights=None, **without, **options)


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    if find_spec("timm") is None:
        raise ValueError("needs the package timm: pip install timm")
    import timm  # pyright: ignore[reportMissingImports]  # optional

    _check_known(name, "timm", timm.list_models())
    return timm.create_model(name, pretrained=False, **options)


def _check_known(name: str, package: str, known: list[str]) -> None:
    if name not in known:
        closest = get_close_matches(name, known, cutoff=0)
        raise ValueError(f"{package} has no classifier of that name, did you mean {', '.join(closest)}?")


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error), 120, placeholder=" ...")
