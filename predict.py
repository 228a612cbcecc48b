"""Classifies image files with a checkpoint or an export; see --help."""

from cifar_zero.core.interrupt import start

if __name__ == "__main__":
    start("cifar_zero.exporting.predict")
