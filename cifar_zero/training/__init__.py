"""Assembles the Trainer of a run: the fast loop, metrics, test-time augmentation and callbacks."""
