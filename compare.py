"""Trains one recipe under several strategies and says whether they agree; see --help."""

from cifar_zero.core.interrupt import start
from evaluate import classes


def train(*arguments: object) -> object:
    """Trains a run; see train.py, which is imported late because it takes time."""
    from train import train

    return train(*arguments)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    start("cifar_zero.comparison.compare", train, classes)
