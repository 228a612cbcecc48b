"""Draws augmentation.png, ten digits in each row, into the current folder: `python docs/augmentation.py`."""

import torch
from matplotlib import pyplot
from torchvision.utils import make_grid

from cifar_zero.config import command_line
from datamodule import CIFARDataModule

rows, options = [], ("crop 0", "crop 4", "cutout 12", "erasing 1", "policy randaugment", "mixup 1", "cutmix 1")
for option in options:
    flags = f"--data.source digits --batch_size 10 --augment.{option}"
    data = CIFARDataModule(command_line.parse(flags.split()))
    data.prepare_data()
    data.setup()
    images, labels = next(iter(data.train_dataloader()))
    rows.append(images / 2 + 0.5)  # from [-1, 1]
pyplot.figure(figsize=(13.3, 9.4))  # three screen pixels for each pixel of an image
pyplot.imshow(make_grid(torch.cat(rows), nrow=10).permute(1, 2, 0).numpy(), interpolation="nearest")
pyplot.yticks(range(18, 240, 34), ["unchanged", *options[1:]], fontsize=14)
pyplot.xticks([])
pyplot.savefig("augmentation.png", bbox_inches="tight")
