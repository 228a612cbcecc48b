"""Predicts what a run takes of a rank's memory under each strategy, before a launch, and which strategy to take."""
