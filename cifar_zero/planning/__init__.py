"""Predicts how much memory a rank needs under each strategy, and recommends a strategy (cifar-zero plan)."""
