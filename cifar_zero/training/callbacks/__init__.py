"""Lightning callbacks that write curves, figures and checkpoints, measure speed and memory, average weights, choose the
CPU's kernels, or end the training. `training.build` adds them to the Trainer."""
