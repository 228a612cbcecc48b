"""Augments and normalises blocks of images, on any device.

A block has the shape (n, H, W, 3), in which images are stored, so that the bytes of a row of pixels are contiguous. The
same draws must give the same bits for every block size and on every device. lerp and addcmul are therefore not used,
because a processor may fuse their multiplication with their addition.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.transforms import v2

from cifar_zero.config.recipe import PLAIN, AugmentConfig, Inputs, Padding
from cifar_zero.core.errors import UsageError, short
from cifar_zero.data.draws import Draws, draw
from stepcheck.lightning import user_code

Transform = Callable[[Tensor], Tensor]
"""A function that maps uint8 images (N, 3, H, W) to uint8 images of the same shape. Like a transform of
torchvision.transforms.v2, it draws its random numbers once per call."""


@dataclass
class Augmentation:
    """Augments and normalises the images of a split. With the defaults of --augment, it only normalises them."""

    config: AugmentConfig
    count: int  # images of the split
    num_classes: int  # width of mixed labels
    seed: int
    inputs: Inputs = PLAIN

    def __post_init__(self) -> None:
        self.transforms = transforms_of(self.config)  # called once per group of images

    def draw(self, epoch: int) -> Draws:
        """Draws an epoch's augmentation of each image. The rows of the result are ordered by position in the split."""
        return draw(self.config, self.count, self.seed, epoch, self.inputs.side)

    def apply(self, images: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Augments and normalises a block of stored images, and returns it with its labels.

        Args:
            images: uint8 (n, H, W, 3). With mixing, there are 2n images, of which the last n are the partners.
            labels: int64 (n,), or (2n,) with mixing.
            draws: one row for each input image.

        Returns:
            Images float32 (n, H, W, 3), and the unchanged labels. With mixing, the labels are float32 (n, classes).
        """
        if draws.flip is not None or draws.crop is not None:
            images = flip_and_crop(images, draws.flip, draws.crop, self.config.crop, self.config.padding)
        if draws.group is not None:
            images = in_groups(images, draws.group, self.transforms)
        images = normalize(images, self.inputs, channels=3)
        for boxes in (draws.cutout, draws.erasing):
            if boxes is not None:
                blank_out(images, boxes)
        if draws.box is None or draws.weight is None:
            return images, labels
        count = len(images) // 2
        return mix(images, labels, draws.box[:count], draws.weight[:count], self.num_classes)


def normalize(images: Tensor, inputs: Inputs = PLAIN, dtype: torch.dtype = torch.float32, channels: int = 1) -> Tensor:
    """Normalises uint8 pixels bit for bit like torchvision's ToTensor and Normalize, and casts them to `dtype`.
    `channels` is the dimension of red, green and blue. Floating-point images are only cast, because a loader has
    normalised them. The arithmetic is float32, because pixels 1/255 apart would become equal in bfloat16."""
    if not images.is_floating_point():
        # For a division by a Python number, torch multiplies with its reciprocal on a GPU, which gives a different
        # result for 111 of the 256 values. (x / 255 - 0.5) / 0.5 is computed in two passes, as x / 127.5 - 1. This
        # changes no bit, because 0.5 is a power of two.
        images = images.float()
        if inputs.mean == inputs.std == (0.5,):
            images = images.div_(filled_like((127.5,), images, channels)).sub_(1)
        else:
            mean, std = (filled_like(values, images, channels) for values in (inputs.mean, inputs.std))
            images = images.div_(filled_like((255.0,), images, channels)).sub_(mean).div_(std)
    return images.to(dtype)


def filled_like(values: tuple[float, ...], images: Tensor, channels: int) -> Tensor:
    """Returns a float32 image like `images[:1]` in shape and memory layout, filled with one value, or with one value
    per channel. torch's operations are 5 times as fast with it as with a tensor of three values."""
    image = torch.empty_like(images[:1], dtype=torch.float32)
    for channel, value in enumerate(values):
        image.movedim(channels, 0)[channel :: len(values)] = value
    return image


@torch.compiler.assume_constant_result  # torch.compile cannot trace torch.backends
def memory_format(device: torch.device) -> torch.memory_format:
    """Returns the memory format of batches (N, 3, H, W): channels_last, except on a CPU without oneDNN's convolutions.

    Max-pooling is vectorised only for channels_last. With this format, a training step of Net took 14 % less time for
    512 images and 6 % less for 4 images, but torch's own convolutions, without oneDNN, took 1.5 times as long (float32,
    AMD EPYC, torch 2.15). On a GPU, cuDNN's tensor core kernels for half precision prefer this format (NVIDIA,
    Convolutional Layers User's Guide, "Tensor Layouts In Memory").
    """
    onednn = torch.backends.mkldnn
    if device.type == "cpu" and not (onednn.is_available() and onednn.enabled):
        return torch.contiguous_format
    return torch.channels_last


def flip_and_crop(
    images: Tensor, flip: Tensor | None, crop: Tensor | None, border: int, padding: Padding = "black"
) -> Tensor:
    """Returns images uint8 (n, H, W, 3), mirrored where `flip` is true, then padded and cropped as torchvision does.

    Args:
        flip: bool (n,), or None to mirror no image.
        crop: int (n, 2), top left corner of each crop in the padded image. None is the top left corner of that image.
        border: padding in pixels on each side.
        padding: "black" pads with black pixels, and "reflect" with the image mirrored at its outermost pixels.
    """
    count, height, width, channels = images.shape
    variants = [images]
    if flip is not None:
        variants.append(images.flip(2))
    canvas = images.new_zeros(count, len(variants), height + 2 * border, width + 2 * border, channels)
    for which, pixels in enumerate(variants):
        canvas[:, which, border : border + height, border : border + width] = pixels
    if padding == "reflect" and border:
        reflect(canvas, border, dim=2)
        reflect(canvas, border, dim=3)
    per_image, per_variant, per_line, per_pixel, _ = canvas.stride()
    start = torch.arange(0, count * per_image, per_image, device=images.device)
    if flip is not None:
        start.add_(flip, alpha=per_variant)
    if crop is not None:
        start.add_(crop[:, 0], alpha=per_line).add_(crop[:, 1], alpha=per_pixel)
    lines = start[:, None] + torch.arange(0, height * per_line, per_line, device=images.device)
    # Row i of `anywhere` is the line of pixels that begins at byte i of the canvas, so a line is copied at once.
    line_bytes = width * channels
    anywhere = canvas.as_strided((canvas.numel() - line_bytes + 1, line_bytes), (1, 1))
    return anywhere.index_select(0, lines.flatten()).view(images.shape)


def reflect(canvas: Tensor, border: int, dim: int) -> None:
    """Fills the first and last `border` entries of a dimension, in place, with the mirror image of the entries next to
    them, without repeating the outermost one."""
    size = canvas.shape[dim]
    canvas.narrow(dim, 0, border).copy_(canvas.narrow(dim, border + 1, border).flip(dim))
    canvas.narrow(dim, size - border, border).copy_(canvas.narrow(dim, size - 2 * border - 1, border).flip(dim))


def blank_out(images: Tensor, boxes: Tensor) -> None:
    """Sets the box (n, 4) of each normalised image (n, W, W, 3) to 0, which is the mean, in place, as in the cutout of
    DeVries and Taylor."""
    vertical, horizontal = sides(boxes, images)
    keep = torch.maximum(1 - vertical, 1 - horizontal)
    images.view(keep.shape).mul_(keep)


def mix(images: Tensor, labels: Tensor, boxes: Tensor, weights: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Blends each image with its partner inside a box. The labels of the two are mixed in proportion to their shares of
    the result.

    Args:
        images: float32 (2n, W, W, 3), with the partners last. All of them are overwritten.
        labels: int64 (2n,), with the partners' labels last.
        boxes: int (n, 4), the box of each image.
        weights: float32 (n,), the partner's weight inside the box.

    Returns:
        Images float32 (n, W, W, 3), and labels float32 (n, num_classes) with sums of 1.
    """
    own, partners = images.chunk(2)
    vertical, horizontal = sides(boxes, own)
    share = (vertical * weights[:, None, None]) * horizontal
    own.view(share.shape).mul_(1 - share).add_(partners.view(share.shape).mul_(share))
    top, bottom, left, right = boxes.unbind(1)
    label_share = (weights * ((bottom - top) * (right - left)) / (own.shape[1] * own.shape[2]))[:, None]
    own_labels, partners_labels = torch.eye(num_classes, device=labels.device).index_select(0, labels).chunk(2)
    return own, own_labels * (1 - label_share) + partners_labels * label_share


def sides(boxes: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two masks for square images (n, W, W, 3), whose product is 1 inside the box of each image and 0 outside:
    float32 (n, W, 1) for the rows, and (n, 1, W * 3) for the columns and channels. `boxes` is int (n, 4): top, bottom,
    left, right, where bottom and right are excluded."""
    start, stop = boxes.view(-1, 2, 2, 1).unbind(2)
    pixel = torch.arange(images.shape[1], device=images.device)
    vertical, horizontal = ((pixel >= start) & (pixel < stop)).float().unbind(1)
    return vertical[:, :, None], horizontal.repeat_interleave(images.shape[3], dim=1)[:, None, :]


def transforms_of(config: AugmentConfig) -> list[Transform]:
    """Returns the transforms of --augment.policy and --augment.transform, in this order. Raises UsageError if a
    configuration names a transform in the user's code that the command line does not name too."""
    transforms: list[Transform] = []
    if config.policy == "randaugment":
        transforms.append(v2.RandAugment())
    elif config.policy == "autoaugment":
        transforms.append(v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10))
    elif config.policy == "trivialaugment":
        transforms.append(v2.TrivialAugmentWide())
    if config.transform:
        transforms.append(user_code.allowed(config.transform, "--augment.transform"))
    return transforms


def in_groups(images: Tensor, seeds: Tensor, transforms: list[Transform]) -> Tensor:
    """Applies the transforms to images uint8 (n, H, W, 3) and returns the results. Images with the same seed form a
    group. Each transform is called once per group, with torch's random generators seeded for the group. At the end the
    generators are restored. Raises ValueError if the transforms change the shape or dtype.

    Args:
        seeds: int64 (n,) on the CPU, the seed of each image's group.
    """
    result = torch.empty_like(images)
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
        for seed in seeds.unique().tolist():
            members = (seeds == seed).nonzero().flatten().to(images.device, non_blocking=True)
            torch.manual_seed(seed)
            before = group = images[members].permute(0, 3, 1, 2)
            for transform in transforms:
                group = transform(group)
            if (group.shape, group.dtype) != (before.shape, before.dtype):
                returned = f"{group.dtype} {tuple(group.shape)} for {len(members)} images"
                raise ValueError(f"must return uint8 images of the same shape, but returned {returned}")
            result[members] = group.permute(0, 2, 3, 1)
    return result


def check_transform(config: AugmentConfig, side: int) -> None:
    """Tries the user's transform on a few images. Raises UsageError if the command line does not name it, if it fails,
    if it changes the shape or dtype of the images, or if its result for an image depends on the other images."""
    (transform,) = transforms_of(AugmentConfig(transform=config.transform))
    flag = f"--augment.transform {config.transform}"
    brightness = torch.tensor([64, 128, 192, 255])[:, None, None, None]
    images = (torch.rand(4, side, side, 3, generator=torch.Generator().manual_seed(0)) * brightness).byte()
    seeds = torch.zeros(4, dtype=torch.int64)
    try:
        together, alone = (in_groups(images[:count], seeds[:count], [transform]) for count in (4, 1))
    except Exception as error:  # a user's code may raise anything
        raise UsageError(f"{flag}: {user_code.where(error)}{type(error).__name__}: {short(error)}") from error
    if not torch.equal(together[:1], alone):
        raise UsageError(
            f"{flag}: its result for an image depends on the other images of the batch: draw random values once per "
            "call, not once per image"
        )
