"""Side-by-side measurements against reference loops: `python -m benchmarks.NAME`, described in docs/performance.md."""
