"""Side-by-side measurements against reference loops. `python -m benchmarks.NAME` starts one; docs/performance.md
describes them."""
