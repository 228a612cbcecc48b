"""Starts and supervises the ranks of a run on this computer, or uses ranks that torchrun, SLURM or DeepSpeed's launcher
has started."""
