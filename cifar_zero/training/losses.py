"""The losses of --loss."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from cifar_zero.config.flags import LossName
from cifar_zero.data.dataset import IGNORED


def loss(
    name: LossName,
    scores: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """Returns the mean loss of a batch, a scalar; with reduction none the loss of each image (N,).

    mse compares the scores, float32 (N, classes), with 1 for the class and 0 for the others (Hui and Belkin 2021,
    "Evaluation of Neural Architectures Trained with Square Loss"); bce takes a score as the log odds of its class. Both
    are summed over the classes. Labels are int64 (N,), of which IGNORED ones count 0 in an unreduced loss, or the share
    of each class (N, classes). `label_smoothing` is the share of a label that is spread evenly over all classes.
    """
    if name == "cross_entropy":
        return F.cross_entropy(
            scores, labels, label_smoothing=label_smoothing, reduction=reduction, ignore_index=IGNORED
        )
    soft = labels.is_floating_point()
    shares = labels if soft else F.one_hot(labels.clamp(min=0), scores.shape[1]).to(scores.dtype)
    shares = shares * (1 - label_smoothing) + label_smoothing / scores.shape[1]
    each = F.mse_loss if name == "mse" else F.binary_cross_entropy_with_logits
    of_images = each(scores, shares, reduction="none").sum(dim=1)
    if not soft:
        of_images = of_images.masked_fill(labels == IGNORED, 0)
    return of_images.mean() if reduction == "mean" else of_images
