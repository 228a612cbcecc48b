"""Callbacks that write curves and figures, average weights, or end the training; `training.build` lists them."""
