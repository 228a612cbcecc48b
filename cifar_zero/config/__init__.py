"""Typed options, the command line, the checks of the options, and the specifications of the strategies, all without
torch."""
