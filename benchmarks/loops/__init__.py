"""The reference loops and programs, each started by `python -m benchmarks.loops.NAME`; the last line is JSON."""
