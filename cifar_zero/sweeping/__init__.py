"""Searches for the best settings of a recipe with Optuna."""
