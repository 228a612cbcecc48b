"""Measures train.py side by side with reference loops (docs/performance.md), and releases and known bugs of DeepSpeed.
`python -m benchmarks.NAME` starts a measurement."""
