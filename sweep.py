"""Trains a recipe with many settings and seeds and reports which one is best; see --help."""

from cifar_zero.core.interrupt import start

if __name__ == "__main__":
    start("cifar_zero.sweeping.sweep")
