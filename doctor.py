"""Checks that this computer, or the nodes of a cluster, can train; see --help."""

from cifar_zero.core.interrupt import start

if __name__ == "__main__":
    start("cifar_zero.diagnosis.doctor")
