"""The reference loops and programs. `python -m benchmarks.loops.NAME` starts one, whose last line of output is JSON."""
