"""The reference loops and programs, each started by `python -m benchmarks.loops.NAME`; one line of JSON ends it."""
