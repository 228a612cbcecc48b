"""Trains and tests a CIFAR classifier, as `cifar-zero train` does; see --help and cifar_zero/train.py."""

from cifar_zero.__main__ import run

if __name__ == "__main__":
    run("train")
