"""Models as their users export them, each planned and run in a process of its own (benchmarks/exports.py)."""
