"""Lightning callbacks that write curves, figures and checkpoints, average weights, or end the training.
`training.build` adds them to the Trainer."""
