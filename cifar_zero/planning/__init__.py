"""Predicts how much memory a rank needs and how many bytes it sends under each strategy, and recommends a strategy
(cifar-zero plan)."""
