"""Predicts a rank's memory and the bytes that it sends under each strategy, and recommends one (cifar-zero plan)."""
