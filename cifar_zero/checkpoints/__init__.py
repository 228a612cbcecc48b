"""Reading the checkpoints of every strategy."""
