"""Trains one recipe under several strategies, reads the runs back, judges whether they agree, and writes the report."""
