"""Helpers for all other packages: errors, exit codes, signals, console output, atomic writes, hardware, plain data.
Importing them does not import torch."""
