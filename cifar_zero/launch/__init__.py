"""Starts and supervises the ranks of a run on this computer, or joins ranks of torchrun, SLURM or DeepSpeed."""
