"""Defines the typed options, the command line, the checks of the options, and the specifications of the strategies.
Importing this package does not import torch."""
