"""Contains the reference loops and programs. `python -m benchmarks.loops.NAME` starts one of them, and its last line of
output is JSON."""
