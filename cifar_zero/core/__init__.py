"""Errors and exit codes, the console, atomic file writes, hardware, start-up time; nothing here imports torch early."""
