"""Writes, finds and reads the checkpoints of every strategy."""
