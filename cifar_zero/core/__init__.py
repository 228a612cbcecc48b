"""Errors, exit codes, Ctrl-C, console, atomic file writes, hardware, plain data; nothing imports torch early."""
