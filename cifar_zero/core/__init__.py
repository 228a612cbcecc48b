"""Helpers for all other packages: errors, exit codes, signals, console output, atomic writes and hardware.
Importing them does not import torch."""
