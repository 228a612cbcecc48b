"""Measures train.py side by side with reference loops. `python -m benchmarks.NAME` starts a measurement;
docs/performance.md describes them."""
