"""Errors, exit codes, Ctrl-C, console, atomic file writes, hardware, start-up time; nothing imports torch early."""
