"""Callbacks, one per file: they observe a run and write curves, figures and totals; `run_callbacks` lists them."""
