"""The observers of a run, one per file: they read what happens and write curves, figures and totals; none changes the
training."""
