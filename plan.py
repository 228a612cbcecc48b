"""Predicts the memory that a run needs under each strategy and recommends one; see --help."""

from cifar_zero.core.interrupt import start

if __name__ == "__main__":
    start("cifar_zero.planning.plan")
