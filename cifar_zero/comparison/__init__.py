"""Trains one recipe under several strategies, reads the runs back, and judges whether they agree."""
