"""Starts and supervises the ranks of a run on this computer, or joins those of torchrun, SLURM and DeepSpeed."""
