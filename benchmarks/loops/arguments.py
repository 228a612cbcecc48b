"""What every reference loop is told: the images, the batch, the steps and the device."""

from __future__ import annotations

import argparse

from cifar_zero.config.flags import DataConfig


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all loops have.

    Args:
        description: for the help.
    """
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--cache", required=True, help="directory of decoded images, as --data.cache of train.py")
    made.add_argument("--steps", type=int, default=1000, help="timed optimizer steps (default: 1000)")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: cpu)")
    return made


def data_config(cache: str) -> DataConfig:
    """The images that train.py reads with `--data.source synthetic --data.cache CACHE`."""
    return DataConfig(source="synthetic", cache=cache)
