"""Helpers for all other packages: errors, exit codes, signals, console output, checks of options, safe reading of YAML
and JSON, atomic writes, and hardware. Importing them does not import torch."""
