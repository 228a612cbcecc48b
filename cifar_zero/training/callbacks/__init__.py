"""Callbacks: they observe a run and write curves, figures and totals; `training.build` lists them."""
